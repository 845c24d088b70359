// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shapes: type, sizes and strides of a tensor, in arithmetic that cannot wrap.
//!
//! Made once where a tensor arrives; the rules and the buffers only see these.

use crate::metal::ggml::{Ggml, Kind};

/// ggml's numbers of the types that rules name.
pub(crate) mod kinds {
    pub(crate) const F32: u32 = 0;
    pub(crate) const F16: u32 = 1;
    pub(crate) const Q4_0: u32 = 2;
    pub(crate) const Q4_1: u32 = 3;
    pub(crate) const Q5_0: u32 = 6;
    pub(crate) const Q5_1: u32 = 7;
    pub(crate) const Q8_0: u32 = 8;
    pub(crate) const Q8_1: u32 = 9;
    pub(crate) const Q8_K: u32 = 15;
    pub(crate) const IQ4_NL: u32 = 20;
    pub(crate) const I16: u32 = 25;
    pub(crate) const I32: u32 = 26;
    pub(crate) const I64: u32 = 27;
    pub(crate) const BF16: u32 = 30;
}

/// Most elements of a tensor.
const MAX_ELEMENTS: u64 = 1 << 40;
/// Most bytes from a tensor's first to its last.
pub(crate) const MAX_BYTES: u64 = 1 << 42;

/// Why a shape is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ShapeError {
    /// No type of the engine.
    #[error("type {kind} is unknown to the engine's ggml")]
    Kind {
        /// Its number.
        kind: u32,
    },
    /// A type that only exists within a computation.
    #[error("type {kind} is no type of a tensor")]
    Inner {
        /// Its number.
        kind: u32,
    },
    /// The sizes are too large.
    #[error("sizes {ne:?} with strides {nb:?} are too large")]
    TooLarge {
        /// Elements in each dimension.
        ne: [u32; 4],
        /// Strides.
        nb: [u32; 4],
    },
    /// A row does not consist of whole blocks.
    #[error("rows of {ne0} elements are no whole blocks of {block}")]
    Blocks {
        /// Elements of a row.
        ne0: u32,
        /// Elements of a block.
        block: u64,
    },
}

/// A tensor's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: u32,
    pub(crate) ne: [u64; 4],
    pub(crate) nb: [u64; 4],
    pub(crate) block: u64,
    pub(crate) block_bytes: u64,
    pub(crate) quantized: bool,
    /// From its first byte to its last, as ggml counts.
    pub(crate) bytes: u64,
}

impl Shape {
    /// Takes what a client says.
    ///
    /// # Errors
    /// When the engine does not have the type, or the sizes are absurd.
    pub(crate) fn new(ggml: &Ggml, kind: u32, ne: [u32; 4], nb: [u32; 4]) -> Result<Self, ShapeError> {
        Self::of_kind(kind, ggml.kind(kind).ok_or(ShapeError::Kind { kind })?, ne, nb)
    }

    pub(crate) fn of_kind(kind: u32, traits: Kind, ne: [u32; 4], nb: [u32; 4]) -> Result<Self, ShapeError> {
        if matches!(kind, kinds::Q8_1 | kinds::Q8_K) {
            return Err(ShapeError::Inner { kind });
        }
        let too_large = || ShapeError::TooLarge { ne, nb };
        if ne.iter().any(|count| i32::try_from(*count).is_err()) {
            return Err(too_large());
        }
        let [ne0, ..] = ne;
        if u64::from(ne0) % traits.block != 0 {
            return Err(ShapeError::Blocks { ne0, block: traits.block });
        }
        let elements: u128 = ne.iter().map(|count| u128::from(*count)).product();
        let shape = Self {
            kind,
            ne: ne.map(u64::from),
            nb: nb.map(u64::from),
            block: traits.block,
            block_bytes: traits.bytes,
            quantized: traits.quantized,
            bytes: 0,
        };
        let bytes = u64::try_from(shape.span()).map_err(|_| too_large())?;
        if elements > u128::from(MAX_ELEMENTS) || bytes > MAX_BYTES {
            return Err(too_large());
        }
        Ok(Self { bytes, ..shape })
    }

    /// ggml's rule for the bytes from the first to the last.
    fn span(&self) -> u128 {
        if self.ne.contains(&0) {
            return 0;
        }
        let wide = |dimension: usize| {
            let (ne, nb) = (self.ne.get(dimension), self.nb.get(dimension));
            u128::from(ne.copied().unwrap_or(1) - 1) * u128::from(nb.copied().unwrap_or(0))
        };
        let [ne0, ..] = self.ne;
        let [nb0, ..] = self.nb;
        let first = if self.block == 1 {
            u128::from(self.block_bytes) + wide(0)
        } else {
            u128::from(ne0) * u128::from(nb0) / u128::from(self.block)
        };
        first + wide(1) + wide(2) + wide(3)
    }

    pub(crate) fn elements(&self) -> u64 {
        self.ne.iter().product()
    }

    pub(crate) fn rows(&self) -> u64 {
        self.ne.iter().skip(1).product()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ne.contains(&0)
    }

    pub(crate) fn is(&self, kind: u32) -> bool {
        self.kind == kind
    }

    pub(crate) fn is_any(&self, kinds: &[u32]) -> bool {
        kinds.contains(&self.kind)
    }

    pub(crate) fn same_sizes(&self, other: &Self) -> bool {
        self.ne == other.ne
    }

    /// Neighbours in a row are neighbours in memory.
    pub(crate) fn dense_rows(&self) -> bool {
        let [nb0, ..] = self.nb;
        nb0 == self.block_bytes
    }

    /// No gaps, as ggml sees it: strides of dimensions of one do not matter.
    pub(crate) fn contiguous(&self) -> bool {
        let [ne0, ..] = self.ne;
        if ne0 != self.block && !self.dense_rows() {
            return false;
        }
        let mut next = u128::from(self.block_bytes) * u128::from(ne0 / self.block);
        for (ne, nb) in self.ne.iter().zip(&self.nb).skip(1).filter(|(ne, _)| **ne != 1) {
            if u128::from(*nb) != next {
                return false;
            }
            next *= u128::from(*ne);
        }
        true
    }

    /// All rows follow each other at one stride, the second. ggml's own contiguity leaves that stride open where
    /// the second size is one, yet many kernels step through all rows by it.
    pub(crate) fn even_rows(&self) -> bool {
        let ([_, ne1, ne2, ne3], [_, nb1, nb2, nb3]) = (self.ne, self.nb);
        let across = u128::from(nb1) * u128::from(ne1);
        self.dense_rows()
            && (ne2 <= 1 || u128::from(nb2) == across)
            && (ne3 <= 1 || u128::from(nb3) == across * u128::from(ne2))
    }

    /// No gaps, and strides that say so even where ggml does not look.
    pub(crate) fn packed(&self) -> bool {
        self.contiguous() && self.even_rows()
    }

    /// Strides do not fall, as results of matrix operations must have them.
    pub(crate) fn ascending(&self) -> bool {
        self.nb.is_sorted()
    }

    /// Repeating it along its dimensions gives sizes like `to`.
    pub(crate) fn repeats_to(&self, to: &Self) -> bool {
        self.ne.iter().zip(&to.ne).all(|(from, to)| divides(*from, *to))
    }
}

/// `part` is not zero and goes into `whole`.
pub(crate) fn divides(part: u64, whole: u64) -> bool {
    whole.checked_rem(part) == Some(0)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn kind_of(kind: u32) -> Kind {
        let (block, bytes) = match kind {
            kinds::F32 | kinds::I32 => (1, 4),
            kinds::F16 | kinds::BF16 | kinds::I16 => (1, 2),
            kinds::I64 => (1, 8),
            kinds::Q4_0 => (32, 18),
            kinds::Q8_0 => (32, 34),
            _ => unreachable!("no test needs it"),
        };
        Kind { block, bytes, quantized: block > 1 }
    }

    /// A tensor without gaps.
    pub(crate) fn plain(kind: u32, ne: [u32; 4]) -> Shape {
        let traits = kind_of(kind);
        let mut nb = [u32::try_from(traits.bytes).unwrap(); 4];
        nb[1] = u32::try_from(u64::from(ne[0]) / traits.block * traits.bytes).unwrap();
        nb[2] = nb[1] * ne[1];
        nb[3] = nb[2] * ne[2];
        Shape::of_kind(kind, traits, ne, nb).unwrap()
    }

    #[test]
    fn bytes_are_counted_as_ggml_counts() {
        assert_eq!(plain(kinds::F32, [3, 2, 1, 1]).bytes, 24);
        assert_eq!(plain(kinds::Q4_0, [64, 3, 1, 1]).bytes, 108);
        assert_eq!(plain(kinds::F32, [3, 0, 1, 1]).bytes, 0);
        let strided = Shape::of_kind(0, kind_of(0), [2, 2, 1, 1], [8, 100, 0, 0]).unwrap();
        assert_eq!(strided.bytes, 4 + 8 + 100);
        assert!(!strided.contiguous() && !strided.dense_rows());
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let f32s = kind_of(0);
        assert!(Shape::of_kind(0, f32s, [u32::MAX, 1, 1, 1], [4; 4]).is_err());
        assert!(Shape::of_kind(0, f32s, [1 << 30, 1 << 30, 1 << 30, 1 << 30], [4; 4]).is_err());
        assert!(Shape::of_kind(0, f32s, [1, 1 << 30, 1, 1], [4, u32::MAX, 0, 0]).is_err());
        assert!(Shape::of_kind(kinds::Q4_0, kind_of(kinds::Q4_0), [33, 1, 1, 1], [18; 4]).is_err());
        assert!(matches!(Shape::of_kind(9, f32s, [1; 4], [4; 4]), Err(ShapeError::Inner { kind: 9 })));
    }

    #[test]
    fn rows_are_even_only_at_one_stride() {
        let shape = |ne, nb| Shape::of_kind(0, kind_of(0), ne, nb).unwrap();
        assert!(shape([4, 1, 5, 2], [4, 16, 16, 80]).even_rows());
        assert!(!shape([4, 1, 5, 1], [4, 4096, 16, 80]).even_rows());
        assert!(!shape([4, 1, 1, 2], [4, 4096, 16, 16]).packed());
        assert!(shape([4, 1, 1, 1], [4, 4096, 7, 7]).packed());
    }

    #[test]
    fn contiguity_ignores_strides_that_are_never_taken() {
        let odd = Shape::of_kind(0, kind_of(0), [4, 1, 2, 1], [4, 999, 16, 7]).unwrap();
        assert!(odd.contiguous());
        let rows = Shape::of_kind(0, kind_of(0), [4, 3, 2, 1], [4, 32, 96, 192]).unwrap();
        assert!(!rows.contiguous() && rows.even_rows());
    }

    proptest! {
        #[test]
        fn the_last_element_lies_within_the_bytes(
            ne in proptest::array::uniform4(1_u32..9), nb in proptest::array::uniform4(0_u32..5000),
        ) {
            let shape = Shape::of_kind(0, kind_of(0), ne, nb).unwrap();
            let last: u64 = (0..4).map(|i| (shape.ne[i] - 1) * shape.nb[i]).sum();
            prop_assert_eq!(last + 4, shape.bytes);
        }
    }
}
