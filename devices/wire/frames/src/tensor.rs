// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors and a model's ports: element types, dimensions, sizes that cannot overflow.

use alloc::string::String;
use alloc::vec::Vec;

use crate::FrameError;
use crate::read::{Reader, widen};
use crate::write::Writer;

/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 16;
/// Largest dimension.
pub const MAX_DIM: u64 = 1 << 40;
/// Most inputs of a model, and most outputs.
pub const MAX_PORTS: usize = 1024;
/// Longest name of an input or an output, and longest label of a model.
pub const MAX_NAME_BYTES: usize = 1024;

const RANK_ALLOWED: &str = "0 to 16";
const PORTS_ALLOWED: &str = "0 to 1024";
const NAME_ALLOWED: &str = "0 to 1024 bytes";
const DIM_ALLOWED: &str = "0 to 2^40";

macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $bytes:literal;)*) => {
        /// Element types that travel, under ONNX's numbers. Texts and packed 4-bit and 8-bit floats do not.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Element {
            $($(#[$doc])* $name,)*
        }

        impl Element {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// ONNX's number, which is ONNX Runtime's too.
            #[must_use]
            pub const fn number(self) -> u8 {
                match self {
                    $(Self::$name => $number,)*
                }
            }

            /// Length of one element.
            #[must_use]
            pub const fn bytes(self) -> u64 {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }

            /// The type of this number, or `None`.
            #[must_use]
            pub const fn from_number(number: i32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

elements! {
    /// 32-bit float.
    F32 = 1, 4;
    /// Unsigned byte.
    U8 = 2, 1;
    /// Signed byte.
    I8 = 3, 1;
    /// Unsigned 16 bits.
    U16 = 4, 2;
    /// Signed 16 bits.
    I16 = 5, 2;
    /// Signed 32 bits.
    I32 = 6, 4;
    /// Signed 64 bits.
    I64 = 7, 8;
    /// A byte, 0 or 1.
    Bool = 9, 1;
    /// 16-bit float.
    F16 = 10, 2;
    /// 64-bit float.
    F64 = 11, 8;
    /// Unsigned 32 bits.
    U32 = 12, 4;
    /// Unsigned 64 bits.
    U64 = 13, 8;
    /// 32-bit float cut to 16 bits.
    Bf16 = 16, 2;
}

impl Element {
    /// Whether an engine may use it as an index or a size: such data must be copied out of shared memory before use.
    #[must_use]
    pub const fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::F64 | Self::Bf16)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let number = from.u8("element")?;
        let unknown = FrameError::Value {
            field: "element",
            value: number.into(),
            allowed: "ONNX's 1 to 7, 9 to 13, 16",
        };
        Self::from_number(number.into()).ok_or(unknown)
    }
}

/// Element type and shape of a tensor in a run. Its size is at most [`crate::MAX_RUN_BYTES`]; nothing overflows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tensor {
    element: Element,
    dims: Vec<u64>,
    bytes: u64,
}

impl Tensor {
    /// Checks and keeps a shape.
    ///
    /// # Errors
    /// When the rank, a dimension, or the size is over its cap. The size is that of the dimensions other than 0, so
    /// that an empty tensor hides no overflow either.
    pub fn new(element: Element, dims: Vec<u64>) -> Result<Self, FrameError> {
        if dims.len() > MAX_RANK {
            return Err(FrameError::Value { field: "rank", value: widen(dims.len()), allowed: RANK_ALLOWED });
        }
        let mut reach = element.bytes();
        for dim in &dims {
            if *dim > MAX_DIM {
                return Err(FrameError::Value { field: "dimension", value: *dim, allowed: DIM_ALLOWED });
            }
            reach = reach
                .checked_mul((*dim).max(1))
                .filter(|bytes| *bytes <= crate::MAX_RUN_BYTES)
                .ok_or(FrameError::Size { field: "tensor", cap_bytes: crate::MAX_RUN_BYTES })?;
        }
        let bytes = if dims.contains(&0) { 0 } else { reach };
        Ok(Self { element, dims, bytes })
    }

    /// Its element type.
    #[must_use]
    pub const fn element(&self) -> Element {
        self.element
    }

    /// Its dimensions; none for a scalar.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// Length of its data.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    fn write(&self, to: &mut Writer) {
        to.u8(self.element.number());
        to.u8(u8::try_from(self.dims.len()).unwrap_or(u8::MAX));
        for dim in &self.dims {
            to.u64(*dim);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let element = Element::read(from)?;
        let rank = read_rank(from)?;
        let mut dims = Vec::with_capacity(rank);
        for _ in 0..rank {
            dims.push(from.u64("dimension")?);
        }
        Self::new(element, dims)
    }
}

fn read_rank(from: &mut Reader<'_>) -> Result<usize, FrameError> {
    let rank = usize::from(from.u8("rank")?);
    if rank > MAX_RANK {
        return Err(FrameError::Value { field: "rank", value: widen(rank), allowed: RANK_ALLOWED });
    }
    Ok(rank)
}

pub(crate) fn write_tensors(to: &mut Writer, tensors: &[Tensor]) -> Result<(), FrameError> {
    to.count("tensors", tensors.len(), MAX_PORTS, PORTS_ALLOWED)?;
    total_bytes(tensors)?;
    for tensor in tensors {
        tensor.write(to);
    }
    Ok(())
}

pub(crate) fn read_tensors(from: &mut Reader<'_>) -> Result<Vec<Tensor>, FrameError> {
    let count = from.count("tensors", MAX_PORTS, PORTS_ALLOWED, 2)?;
    let mut tensors = Vec::with_capacity(count);
    for _ in 0..count {
        tensors.push(Tensor::read(from)?);
    }
    total_bytes(&tensors)?;
    Ok(tensors)
}

/// The sum of the tensors' sizes, under the cap.
pub(crate) fn total_bytes(tensors: &[Tensor]) -> Result<u64, FrameError> {
    tensors
        .iter()
        .try_fold(0_u64, |sum, tensor| sum.checked_add(tensor.bytes))
        .filter(|bytes| *bytes <= crate::MAX_RUN_BYTES)
        .ok_or(FrameError::Size { field: "tensors", cap_bytes: crate::MAX_RUN_BYTES })
}

/// A dimension as a model declares it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Always this.
    Fixed(u64),
    /// Known with the data.
    Free,
}

/// An input or an output of a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Port {
    /// Its name in the graph.
    pub name: String,
    /// What it holds.
    pub element: Element,
    /// Its declared shape; `None` when not even the rank is known.
    pub dims: Option<Vec<Dim>>,
}

/// On the wire a free dimension, and an unknown rank.
const FREE: u64 = u64::MAX;
const UNKNOWN_RANK: u8 = u8::MAX;

impl Port {
    /// Whether a tensor fits the declaration.
    #[must_use]
    pub fn takes(&self, tensor: &Tensor) -> bool {
        self.element == tensor.element
            && self.dims.as_ref().is_none_or(|dims| {
                dims.len() == tensor.dims.len()
                    && dims.iter().zip(&tensor.dims).all(|(declared, dim)| match declared {
                        Dim::Fixed(fixed) => fixed == dim,
                        Dim::Free => true,
                    })
            })
    }

    fn write(&self, to: &mut Writer) -> Result<(), FrameError> {
        to.text("name", &self.name, MAX_NAME_BYTES, NAME_ALLOWED)?;
        to.u8(self.element.number());
        let Some(dims) = &self.dims else {
            to.u8(UNKNOWN_RANK);
            return Ok(());
        };
        match u8::try_from(dims.len()) {
            Ok(rank) if dims.len() <= MAX_RANK => to.u8(rank),
            _ => {
                return Err(FrameError::Value {
                    field: "rank",
                    value: widen(dims.len()),
                    allowed: RANK_ALLOWED,
                });
            }
        }
        for dim in dims {
            to.u64(match dim {
                Dim::Free => FREE,
                Dim::Fixed(value) if *value <= MAX_DIM => *value,
                Dim::Fixed(value) => {
                    return Err(FrameError::Value {
                        field: "dimension",
                        value: *value,
                        allowed: DIM_ALLOWED,
                    });
                }
            });
        }
        Ok(())
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, FrameError> {
        let name = from.text("name", MAX_NAME_BYTES, NAME_ALLOWED)?;
        let element = Element::read(from)?;
        let rank = usize::from(from.u8("rank")?);
        if rank == usize::from(UNKNOWN_RANK) {
            return Ok(Self { name, element, dims: None });
        }
        if rank > MAX_RANK {
            return Err(FrameError::Value { field: "rank", value: widen(rank), allowed: RANK_ALLOWED });
        }
        let mut dims = Vec::with_capacity(rank);
        for _ in 0..rank {
            dims.push(match from.u64("dimension")? {
                FREE => Dim::Free,
                value if value <= MAX_DIM => Dim::Fixed(value),
                value => return Err(FrameError::Value { field: "dimension", value, allowed: DIM_ALLOWED }),
            });
        }
        Ok(Self { name, element, dims: Some(dims) })
    }
}

pub(crate) fn write_ports(to: &mut Writer, field: &'static str, ports: &[Port]) -> Result<(), FrameError> {
    to.count(field, ports.len(), MAX_PORTS, PORTS_ALLOWED)?;
    ports.iter().try_for_each(|port| port.write(to))
}

pub(crate) fn read_ports(from: &mut Reader<'_>, field: &'static str) -> Result<Vec<Port>, FrameError> {
    let count = from.count(field, MAX_PORTS, PORTS_ALLOWED, 4)?;
    let mut ports = Vec::with_capacity(count);
    for _ in 0..count {
        ports.push(Port::read(from)?);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn sizes_follow_from_element_and_dimensions() {
        let bytes = |element, dims: &[u64]| Tensor::new(element, dims.to_vec()).map(|tensor| tensor.bytes());
        assert_eq!(bytes(Element::F32, &[]), Ok(4));
        assert_eq!(bytes(Element::F16, &[1, 3, 224, 224]), Ok(301_056));
        assert_eq!(bytes(Element::I64, &[0, 5]), Ok(0));
    }

    #[test]
    fn what_overflows_or_is_absurd_is_refused() {
        let refused = |dims: Vec<u64>| Tensor::new(Element::F64, dims).unwrap_err();
        assert!(matches!(refused(vec![1 << 63]), FrameError::Value { field: "dimension", .. }));
        assert!(matches!(refused(vec![u64::MAX]), FrameError::Value { field: "dimension", .. }));
        assert!(matches!(refused(vec![1 << 40, 1 << 40]), FrameError::Size { field: "tensor", .. }));
        assert!(
            matches!(refused(vec![0, 1 << 40, 1 << 40]), FrameError::Size { .. }),
            "hidden behind a zero"
        );
        assert!(matches!(refused(vec![1; 17]), FrameError::Value { field: "rank", value: 17, .. }));
    }

    #[test]
    fn a_port_takes_what_it_declares() {
        let port = |dims| Port { name: "x".into(), element: Element::F32, dims };
        let tensor = |dims: &[u64]| Tensor::new(Element::F32, dims.to_vec()).unwrap();
        assert!(port(None).takes(&tensor(&[1, 2])));
        let batch = port(Some(vec![Dim::Free, Dim::Fixed(3)]));
        assert!(batch.takes(&tensor(&[7, 3])));
        assert!(!batch.takes(&tensor(&[7, 4])));
        assert!(!batch.takes(&tensor(&[7])));
        assert!(!batch.takes(&Tensor::new(Element::F64, vec![7, 3]).unwrap()));
    }
}
