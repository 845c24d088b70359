// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether another engine's outputs are the same answer as the processor's. Pure.
//!
//! Integers and truth values must be equal. Numbers with a point may differ by what the order of additions
//! changes, and by more where the engine computes with half the bits; NaN answers NaN, and infinity itself. What
//! cannot be compared (strings, types that nobody knows) is a difference: an engine that cannot be checked is
//! not used.

use std::fmt;

/// One tensor's type, dimensions and bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output<'a> {
    /// Number of its type in ONNX.
    pub(super) dtype: u32,
    pub(super) dims: &'a [u64],
    pub(super) bytes: &'a [u8],
}

/// How exactly an engine computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    /// With the types that the model names.
    Full,
    /// With half of their bits inside, as neural processors and GPUs do.
    Half,
}

/// The largest difference that was let pass, as a share of the largest value of its tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Agreement {
    pub(super) largest: f64,
}

/// Why outputs are not the same answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Difference {
    Count { expected: usize, got: usize },
    Type { output: usize, expected: u32, got: u32 },
    Shape { output: usize },
    Length { output: usize },
    NotComparable { output: usize, dtype: u32 },
    Value { output: usize, element: usize, expected: f64, got: f64, limit: f64 },
    Integer { output: usize, element: usize },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { expected, got } => write!(f, "{got} outputs in place of {expected}"),
            Self::Type { output, expected, got } => {
                write!(f, "output {output} is of type {got} in place of {expected}")
            }
            Self::Shape { output } => write!(f, "output {output} has other dimensions"),
            Self::Length { output } => {
                write!(f, "output {output} is not as long as its dimensions and type say")
            }
            Self::NotComparable { output, dtype } => {
                write!(f, "output {output} is of type {dtype}, which cannot be compared")
            }
            Self::Value { output, element, expected, got, limit } => write!(
                f,
                "output {output}, element {element}: {got} in place of {expected}, {limit:.1e} apart at most"
            ),
            Self::Integer { output, element } => {
                write!(f, "output {output}, element {element} is another integer")
            }
        }
    }
}

/// What may differ: `relative` of each value, and `of_largest` of the largest value of its tensor.
#[derive(Debug, Clone, Copy)]
struct Tolerance {
    relative: f64,
    of_largest: f64,
}

impl Precision {
    const fn tolerance(self) -> Tolerance {
        match self {
            Self::Full => Tolerance { relative: 1e-3, of_largest: 1e-4 },
            Self::Half => Tolerance { relative: 2e-2, of_largest: 1e-2 },
        }
    }
}

/// Bits of a number that a tensor's elements are read as.
#[derive(Debug, Clone, Copy)]
enum Number {
    F16,
    Bf16,
    F32,
    F64,
}

impl Number {
    const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// A type's own coarseness is never an engine's fault.
    fn tolerance(self, given: Tolerance) -> Tolerance {
        let own = match self {
            Self::F16 => 4e-3,
            Self::Bf16 => 2e-2,
            Self::F32 | Self::F64 => 0.0,
        };
        Tolerance { relative: given.relative.max(own), of_largest: given.of_largest.max(own) }
    }

    fn read(self, bytes: &[u8]) -> f64 {
        match self {
            Self::F16 => bytes.try_into().map_or(f64::NAN, |raw| from_f16(u16::from_le_bytes(raw))),
            Self::Bf16 => bytes
                .try_into()
                .map_or(f64::NAN, |raw| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16))),
            Self::F32 => bytes.try_into().map_or(f64::NAN, |raw| f64::from(f32::from_le_bytes(raw))),
            Self::F64 => bytes.try_into().map_or(f64::NAN, f64::from_le_bytes),
        }
    }
}

fn from_f16(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 31);
    let fraction = f64::from(bits & 1023);
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

/// How a type is compared.
enum Way {
    Numbers(Number),
    /// Byte by byte; an element is this long.
    Exact(usize),
    /// Zero or not.
    Truth,
}

/// By the numbers of `TensorProto.DataType`.
const fn way(dtype: u32) -> Option<Way> {
    Some(match dtype {
        1 => Way::Numbers(Number::F32),
        2 | 3 => Way::Exact(1),
        4 | 5 => Way::Exact(2),
        6 | 12 => Way::Exact(4),
        7 | 13 => Way::Exact(8),
        9 => Way::Truth,
        10 => Way::Numbers(Number::F16),
        11 => Way::Numbers(Number::F64),
        16 => Way::Numbers(Number::Bf16),
        // Pairs of numbers are numbers.
        14 => Way::Numbers(Number::F32),
        15 => Way::Numbers(Number::F64),
        _ => return None,
    })
}

/// Elements of the tensor, as numbers of its way.
fn elements(dims: &[u64], dtype: u32) -> Option<u64> {
    let parts = if matches!(dtype, 14 | 15) { 2 } else { 1 };
    dims.iter().try_fold(parts, |all, dim| u64::checked_mul(all, *dim))
}

/// Compares all outputs of a run; the first difference is named.
pub(super) fn compare(
    expected: &[Output<'_>],
    got: &[Output<'_>],
    precision: Precision,
) -> Result<Agreement, Difference> {
    if expected.len() != got.len() {
        return Err(Difference::Count { expected: expected.len(), got: got.len() });
    }
    let mut agreement = Agreement { largest: 0.0 };
    for (output, (expected, got)) in expected.iter().zip(got).enumerate() {
        if expected.dtype != got.dtype {
            return Err(Difference::Type { output, expected: expected.dtype, got: got.dtype });
        }
        if expected.dims != got.dims {
            return Err(Difference::Shape { output });
        }
        let dtype = expected.dtype;
        let way = way(dtype).ok_or(Difference::NotComparable { output, dtype })?;
        let bytes = match &way {
            Way::Numbers(number) => number.bytes(),
            Way::Exact(bytes) => *bytes,
            Way::Truth => 1,
        };
        let whole = elements(expected.dims, dtype).and_then(|count| count.checked_mul(bytes as u64));
        if [expected, got].iter().any(|tensor| Some(tensor.bytes.len() as u64) != whole) {
            return Err(Difference::Length { output });
        }
        let largest = match way {
            Way::Numbers(number) => numbers(output, number, expected.bytes, got.bytes, precision)?,
            Way::Exact(bytes) => {
                exact(output, bytes, expected.bytes, got.bytes, |a, b| a == b)?;
                0.0
            }
            Way::Truth => {
                let is_true = |bytes: &[u8]| bytes != [0];
                exact(output, 1, expected.bytes, got.bytes, |a, b| is_true(a) == is_true(b))?;
                0.0
            }
        };
        agreement.largest = agreement.largest.max(largest);
    }
    Ok(agreement)
}

fn exact(
    output: usize,
    bytes: usize,
    expected: &[u8],
    got: &[u8],
    same: impl Fn(&[u8], &[u8]) -> bool,
) -> Result<(), Difference> {
    let pairs = expected.chunks_exact(bytes).zip(got.chunks_exact(bytes));
    match pairs.enumerate().find(|(_, (expected, got))| !same(expected, got)) {
        Some((element, _)) => Err(Difference::Integer { output, element }),
        None => Ok(()),
    }
}

fn numbers(
    output: usize,
    number: Number,
    expected: &[u8],
    got: &[u8],
    precision: Precision,
) -> Result<f64, Difference> {
    let values = |bytes| <[u8]>::chunks_exact(bytes, number.bytes()).map(|raw| number.read(raw));
    let largest = values(expected).map(f64::abs).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let tolerance = number.tolerance(precision.tolerance());
    // Where all is zero, rounding leaves this much.
    let floor = (tolerance.of_largest * largest).max(1e-7);
    let mut worst = 0f64;
    for (element, (expected, got)) in values(expected).zip(values(got)).enumerate() {
        if expected.is_nan() && got.is_nan() || expected == got {
            continue;
        }
        let apart = (expected - got).abs();
        let limit = if expected.is_finite() { floor + tolerance.relative * expected.abs() } else { 0.0 };
        // Also refuses NaN in place of a number, and a number in place of NaN.
        if apart.is_nan() || apart > limit {
            return Err(Difference::Value { output, element, expected, got, limit });
        }
        worst = worst.max(apart);
    }
    Ok(if largest > 0.0 { worst / largest } else { worst })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn check(dtype: u32, expected: &[u8], got: &[u8], precision: Precision) -> Result<Agreement, Difference> {
        let unit = match dtype {
            7 | 11 => 8,
            1 => 4,
            10 | 16 => 2,
            _ => 1,
        };
        let dims = [expected.len() as u64 / unit];
        let output = |bytes| Output { dtype, dims: &dims, bytes };
        compare(&[output(expected)], &[output(got)], precision)
    }

    #[test]
    fn nan_answers_nan_and_infinity_itself() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1.0];
        let same = [-f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 1.0];
        check(1, &floats(&odd), &floats(&same), Precision::Full).unwrap();
        for (at, wrong) in [(0, 1.0), (1, f32::MAX), (2, f32::INFINITY), (3, f32::NAN), (4, f32::NAN)] {
            let mut got = same;
            got[at] = wrong;
            let error = check(1, &floats(&odd), &floats(&got), Precision::Half).unwrap_err();
            assert!(matches!(error, Difference::Value { element, .. } if element == at), "{error:?}");
        }
    }

    #[test]
    fn what_passes_depends_on_the_engine() {
        let (expected, close) = ([1.0, 100.0, 0.0], [1.0005, 100.05, 0.3]);
        let error = check(1, &floats(&expected), &floats(&close), Precision::Full).unwrap_err();
        assert!(matches!(error, Difference::Value { element: 2, .. }), "{error:?}");
        let agreement = check(1, &floats(&expected), &floats(&close), Precision::Half).unwrap();
        assert!((agreement.largest - 0.003).abs() < 1e-6, "{agreement:?}");
        assert!(check(1, &floats(&[1.0]), &floats(&[2.0]), Precision::Half).is_err());
    }

    #[test]
    fn zeros_are_zeros() {
        assert!(check(1, &floats(&[0.0, 0.0]), &floats(&[0.0, 1e-9]), Precision::Full).is_ok());
        assert!(check(1, &floats(&[0.0, 0.0]), &floats(&[0.0, 0.5]), Precision::Half).is_err());
    }

    #[test]
    fn integers_are_exact_and_truth_is_not_its_byte() {
        let one = 1i64.to_le_bytes();
        let two = 2i64.to_le_bytes();
        check(7, &one, &one, Precision::Half).unwrap();
        assert_eq!(check(7, &one, &two, Precision::Half), Err(Difference::Integer { output: 0, element: 0 }));
        check(9, &[1, 0, 1], &[255, 0, 1], Precision::Full).unwrap();
        assert!(check(9, &[1, 0], &[1, 1], Precision::Full).is_err());
    }

    #[test]
    fn half_floats_are_read_as_they_are() {
        for (bits, value) in
            [(0x3c00, 1.0), (0xc000, -2.0), (0x0001, 5.960_464_477_539_063e-8), (0x7bff, 65504.0)]
        {
            assert_eq!(from_f16(bits), value);
        }
        assert!(from_f16(0x7c00).is_infinite() && from_f16(0x7e00).is_nan());
        let bytes = |bits: u16| bits.to_le_bytes().to_vec();
        check(10, &bytes(0x3c00), &bytes(0x3c02), Precision::Full).unwrap();
        assert!(check(10, &bytes(0x3c00), &bytes(0x3d00), Precision::Full).is_err());
        check(16, &bytes(0x3f80), &bytes(0x3f81), Precision::Full).unwrap();
        assert!(check(16, &bytes(0x3f80), &bytes(0x3fc0), Precision::Full).is_err());
    }

    #[test]
    fn what_has_another_form_or_cannot_be_read_differs() {
        let bytes = floats(&[1.0, 2.0]);
        let output = |dtype, dims| Output { dtype, dims, bytes: &bytes };
        let one = [output(1, &[2])];
        let error = |got: &[Output<'_>]| compare(&one, got, Precision::Full).unwrap_err();
        assert_eq!(error(&[]), Difference::Count { expected: 1, got: 0 });
        assert_eq!(error(&[output(6, &[2])]), Difference::Type { output: 0, expected: 1, got: 6 });
        assert_eq!(error(&[output(1, &[1, 2])]), Difference::Shape { output: 0 });
        let longer = [output(1, &[3])];
        assert_eq!(compare(&longer, &longer, Precision::Full).unwrap_err(), Difference::Length { output: 0 });
        let huge = [output(1, &[u64::MAX, u64::MAX])];
        assert!(compare(&huge, &huge, Precision::Full).is_err());
        let text = [output(8, &[2])];
        assert_eq!(
            compare(&text, &text, Precision::Full).unwrap_err(),
            Difference::NotComparable { output: 0, dtype: 8 }
        );
    }

    proptest! {
        #[test]
        fn anything_agrees_with_itself(
            dtype in prop::sample::select(vec![1u32, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16]),
            count in 0usize..20, seed in any::<[u8; 32]>(),
        ) {
            let unit = match dtype {
                2 | 3 | 9 => 1, 4 | 5 | 10 | 16 => 2, 1 | 6 | 12 => 4, 15 => 16, _ => 8,
            };
            let bytes: Vec<u8> = seed.iter().copied().cycle().take(count * unit).collect();
            let dims = [count as u64];
            let output = [Output { dtype, dims: &dims, bytes: &bytes }];
            prop_assert_eq!(compare(&output, &output, Precision::Full), Ok(Agreement { largest: 0.0 }));
        }

        #[test]
        fn a_far_value_never_passes(
            values in prop::collection::vec(-1e6f32..1e6, 1..50), at in any::<prop::sample::Index>(),
        ) {
            let at = at.index(values.len());
            let largest = values.iter().fold(1f32, |most, value| most.max(value.abs()));
            let mut got = values.clone();
            got[at] += largest * 0.1;
            prop_assert!(check(1, &floats(&values), &floats(&got), Precision::Half).is_err());
        }
    }
}
