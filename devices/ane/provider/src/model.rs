// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes a claimed graph as an ONNX model: a ModelProto without inputs, its larger tensors beside it as weights.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lighter_frames::{Dim, Element, MAX_DIM, Port, WEIGHTS_LOCATION};

use crate::ort::Status;
use crate::ort::attribute::{Attribute, Kind};
use crate::ort::graph::{Declared, DeclaredDim, Edge, Graph, Node};
use crate::ort::tensor::{Constant, View};
use crate::proto::Proto;

/// Tensors from this length on stand beside the model.
const WEIGHT_BYTES: usize = 1024;
const WEIGHT_ALIGNMENT: usize = 64;
const MAX_LABEL_CHARS: usize = 200;

/// Field numbers of ONNX's messages.
mod field {
    pub(super) const MODEL_IR_VERSION: u32 = 1;
    pub(super) const MODEL_PRODUCER: u32 = 2;
    pub(super) const MODEL_GRAPH: u32 = 7;
    pub(super) const MODEL_OPERATOR_SET: u32 = 8;
    pub(super) const SET_DOMAIN: u32 = 1;
    pub(super) const SET_VERSION: u32 = 2;
    pub(super) const GRAPH_NODE: u32 = 1;
    pub(super) const GRAPH_NAME: u32 = 2;
    pub(super) const GRAPH_INITIALIZER: u32 = 5;
    pub(super) const GRAPH_INPUT: u32 = 11;
    pub(super) const GRAPH_OUTPUT: u32 = 12;
    pub(super) const NODE_INPUT: u32 = 1;
    pub(super) const NODE_OUTPUT: u32 = 2;
    pub(super) const NODE_NAME: u32 = 3;
    pub(super) const NODE_OPERATOR: u32 = 4;
    pub(super) const NODE_ATTRIBUTE: u32 = 5;
    pub(super) const NODE_DOMAIN: u32 = 7;
    pub(super) const ATTRIBUTE_NAME: u32 = 1;
    pub(super) const ATTRIBUTE_FLOAT: u32 = 2;
    pub(super) const ATTRIBUTE_INT: u32 = 3;
    pub(super) const ATTRIBUTE_TEXT: u32 = 4;
    pub(super) const ATTRIBUTE_TENSOR: u32 = 5;
    pub(super) const ATTRIBUTE_FLOATS: u32 = 7;
    pub(super) const ATTRIBUTE_INTS: u32 = 8;
    pub(super) const ATTRIBUTE_TEXTS: u32 = 9;
    pub(super) const ATTRIBUTE_KIND: u32 = 20;
    pub(super) const TENSOR_DIM: u32 = 1;
    pub(super) const TENSOR_ELEMENT: u32 = 2;
    pub(super) const TENSOR_NAME: u32 = 8;
    pub(super) const TENSOR_DATA: u32 = 9;
    pub(super) const TENSOR_EXTERNAL: u32 = 13;
    pub(super) const TENSOR_LOCATION: u32 = 14;
    pub(super) const ENTRY_KEY: u32 = 1;
    pub(super) const ENTRY_VALUE: u32 = 2;
    pub(super) const VALUE_NAME: u32 = 1;
    pub(super) const VALUE_TYPE: u32 = 2;
    pub(super) const TYPE_TENSOR: u32 = 1;
    pub(super) const TENSOR_TYPE_ELEMENT: u32 = 1;
    pub(super) const TENSOR_TYPE_SHAPE: u32 = 2;
    pub(super) const SHAPE_DIM: u32 = 1;
    pub(super) const DIM_NUMBER: u32 = 1;
    pub(super) const DIM_NAME: u32 = 2;
}

/// Why a graph cannot be written.
#[derive(Debug)]
pub(crate) enum ModelError {
    /// The runtime said no.
    Ort(Status),
    /// Something that should not have been claimed.
    Unwritable(String),
}

impl From<Status> for ModelError {
    fn from(status: Status) -> Self {
        Self::Ort(status)
    }
}

/// A graph's initialisers, by name.
pub(crate) type Constants<'a> = Vec<(&'a [u8], Constant<'a>)>;

/// A model, in pieces that stand where they stood.
#[derive(Debug)]
pub(crate) struct Written<'a> {
    pub(crate) proto: Proto<'a>,
    pub(crate) weights: Weights<'a>,
    pub(crate) inputs: Vec<Port>,
    pub(crate) outputs: Vec<Port>,
}

/// Tensors beside a model, each with the space before it.
#[derive(Debug, Default)]
pub(crate) struct Weights<'a> {
    pub(crate) pieces: Vec<(usize, &'a [u8])>,
    pub(crate) bytes: usize,
}

impl<'a> Weights<'a> {
    /// Puts a tensor behind the others; gives its place.
    fn add(&mut self, data: &'a [u8]) -> usize {
        let offset = self.bytes.next_multiple_of(WEIGHT_ALIGNMENT);
        self.pieces.push((offset - self.bytes, data));
        self.bytes = offset + data.len();
        offset
    }
}

/// The initialisers that a graph holds and that are not inputs of the node that stands for it.
pub(crate) fn constants<'a>(graph: &Graph<'a>, fused: &Node<'a>) -> Result<Constants<'a>, ModelError> {
    let mut inputs = Vec::new();
    for input in fused.inputs()?.into_iter().flatten() {
        inputs.push(input.name()?.to_bytes());
    }
    let mut constants = Vec::new();
    for edge in graph.initializers()? {
        let name = edge.name()?.to_bytes();
        if let (false, Some(constant)) = (inputs.contains(&name), edge.initializer()?) {
            constants.push((name, constant));
        }
    }
    Ok(constants)
}

/// Writes a graph, with the inputs and outputs of the node that stands for it.
pub(crate) fn write<'a>(
    graph: &Graph<'_>,
    fused: &Node<'_>,
    constants: &'a Constants<'_>,
) -> Result<Written<'a>, ModelError> {
    let mut weights = Weights::default();
    let mut body = Proto::new();
    for node in graph.nodes()? {
        body.message(field::GRAPH_NODE, &write_node(&node)?);
    }
    // The runtime's own name for it differs from session to session; equal models are to have equal bytes.
    body.bytes(field::GRAPH_NAME, b"lighter");
    for (name, constant) in constants {
        let tensor = write_tensor(name, &constant.view()?, Some(&mut weights))?;
        body.message(field::GRAPH_INITIALIZER, &tensor);
    }
    let outputs: Vec<Edge<'_>> = fused.outputs()?.into_iter().flatten().collect();
    for edge in &outputs {
        if let Some(declared) = edge.declared()? {
            body.message(field::GRAPH_OUTPUT, &write_value(edge.name()?.to_bytes(), &declared));
        }
    }
    let mut proto = Proto::new();
    proto.int(field::MODEL_IR_VERSION, graph.ir_version()?);
    proto.bytes(field::MODEL_PRODUCER, b"lighter-ane");
    proto.message(field::MODEL_GRAPH, &body);
    for (domain, version) in graph.operator_sets()? {
        let mut set = Proto::new();
        set.bytes(field::SET_DOMAIN, domain.to_bytes());
        set.int(field::SET_VERSION, version);
        proto.message(field::MODEL_OPERATOR_SET, &set);
    }
    let inputs = fused.inputs()?.into_iter().flatten();
    Ok(Written { proto, weights, inputs: ports(inputs)?, outputs: ports(outputs.into_iter())? })
}

/// What people call a graph: its file's name, else its own.
pub(crate) fn label(graph: &Graph<'_>) -> Result<String, Status> {
    let path = graph.path()?.to_bytes();
    let file = path.rsplit(|byte| *byte == b'/').next().filter(|file| !file.is_empty());
    let name = match file {
        Some(file) => file,
        None => graph.name()?.to_bytes(),
    };
    Ok(String::from_utf8_lossy(name)
        .chars()
        .filter(|char| !char.is_control())
        .take(MAX_LABEL_CHARS)
        .collect())
}

/// A ModelProto with inputs alone: behind the other one it makes a whole model.
pub(crate) fn input_tail(inputs: &[Port]) -> Vec<u8> {
    let mut body = Proto::new();
    for port in inputs {
        let dim = |(place, dim): (usize, &Dim)| match dim {
            Dim::Fixed(number) => DeclaredDim::Fixed(i64::try_from(*number).unwrap_or(i64::MAX)),
            Dim::Free => DeclaredDim::Named(format!("{}.{place}", port.name)),
        };
        let dims = port.dims.as_ref().map(|dims| dims.iter().enumerate().map(dim).collect());
        let declared = Declared { element: port.element.number().into(), dims };
        body.message(field::GRAPH_INPUT, &write_value(port.name.as_bytes(), &declared));
    }
    let mut proto = Proto::new();
    proto.message(field::MODEL_GRAPH, &body);
    proto.pieces().flatten().copied().collect()
}

fn ports<'a>(edges: impl Iterator<Item = Edge<'a>>) -> Result<Vec<Port>, ModelError> {
    edges
        .map(|edge| {
            let name = String::from_utf8_lossy(edge.name()?.to_bytes()).into_owned();
            let declared = edge.declared()?;
            let element = declared.as_ref().and_then(|declared| Element::from_number(declared.element));
            let Some((element, declared)) = element.zip(declared) else {
                return Err(ModelError::Unwritable(format!("value {name} has no type that travels")));
            };
            let dim = |dim: DeclaredDim| match dim {
                DeclaredDim::Fixed(number) => u64::try_from(number)
                    .ok()
                    .filter(|number| *number <= MAX_DIM)
                    .map_or(Dim::Free, Dim::Fixed),
                DeclaredDim::Named(_) => Dim::Free,
            };
            let dims = declared.dims.map(|dims| dims.into_iter().map(dim).collect());
            Ok(Port { name, element, dims })
        })
        .collect()
}

fn write_value(name: &[u8], declared: &Declared) -> Proto<'static> {
    let mut tensor = Proto::new();
    tensor.int(field::TENSOR_TYPE_ELEMENT, declared.element.into());
    if let Some(dims) = &declared.dims {
        let mut shape = Proto::new();
        for dim in dims {
            let mut one = Proto::new();
            match dim {
                DeclaredDim::Fixed(number) => one.int(field::DIM_NUMBER, *number),
                DeclaredDim::Named(name) if name.is_empty() => {}
                DeclaredDim::Named(name) => one.bytes(field::DIM_NAME, name.as_bytes()),
            }
            shape.message(field::SHAPE_DIM, &one);
        }
        tensor.message(field::TENSOR_TYPE_SHAPE, &shape);
    }
    let mut kind = Proto::new();
    kind.message(field::TYPE_TENSOR, &tensor);
    let mut value = Proto::new();
    value.bytes(field::VALUE_NAME, name);
    value.message(field::VALUE_TYPE, &kind);
    value
}

fn write_node(node: &Node<'_>) -> Result<Proto<'static>, ModelError> {
    let mut proto = Proto::new();
    for (number, edges) in [(field::NODE_INPUT, node.inputs()?), (field::NODE_OUTPUT, node.outputs()?)] {
        for edge in edges {
            // One that is left out has an empty name.
            let name = edge.map(|edge| edge.name()).transpose()?;
            proto.bytes(number, name.unwrap_or_default().to_bytes());
        }
    }
    proto.bytes(field::NODE_NAME, node.name()?.to_bytes());
    proto.bytes(field::NODE_OPERATOR, node.operator()?.to_bytes());
    for attribute in node.attributes()? {
        proto.message(field::NODE_ATTRIBUTE, &write_attribute(&attribute)?);
    }
    proto.bytes(field::NODE_DOMAIN, node.domain()?.to_bytes());
    Ok(proto)
}

fn write_attribute(attribute: &Attribute<'_>) -> Result<Proto<'static>, ModelError> {
    let name = attribute.name()?.to_bytes();
    let unwritable = || ModelError::Unwritable(format!("attribute {}", String::from_utf8_lossy(name)));
    let kind = attribute.kind()?.ok_or_else(unwritable)?;
    let mut proto = Proto::new();
    proto.bytes(field::ATTRIBUTE_NAME, name);
    let number = match kind {
        Kind::Int => {
            let value = attribute.ints(kind)?.first().copied().ok_or_else(unwritable)?;
            proto.int(field::ATTRIBUTE_INT, value);
            2
        }
        Kind::Ints => {
            attribute.ints(kind)?.into_iter().for_each(|value| proto.int(field::ATTRIBUTE_INTS, value));
            7
        }
        Kind::Float => {
            let value = attribute.floats(kind)?.first().copied().ok_or_else(unwritable)?;
            proto.float(field::ATTRIBUTE_FLOAT, value);
            1
        }
        Kind::Floats => {
            attribute.floats(kind)?.into_iter().for_each(|value| proto.float(field::ATTRIBUTE_FLOATS, value));
            6
        }
        Kind::Text => {
            let bytes = attribute.bytes(kind)?;
            proto.bytes(field::ATTRIBUTE_TEXT, bytes.strip_suffix(&[0]).unwrap_or(&bytes));
            3
        }
        Kind::Texts => {
            let bytes = attribute.bytes(kind)?;
            texts(&bytes).for_each(|text| proto.bytes(field::ATTRIBUTE_TEXTS, text));
            8
        }
        Kind::Tensor => {
            let tensor = attribute.tensor()?.ok_or_else(unwritable)?;
            let view = tensor.view()?;
            let mut written = write_tensor(b"", &View { data: &[], ..view }, None)?;
            written.bytes(field::TENSOR_DATA, view.data);
            proto.message(field::ATTRIBUTE_TENSOR, &written.into_owned());
            4
        }
    };
    proto.int(field::ATTRIBUTE_KIND, number);
    Ok(proto)
}

/// Texts that end in a zero byte each; the last byte may be left out.
fn texts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let bytes = bytes.strip_suffix(&[0]).or(Some(bytes).filter(|bytes| !bytes.is_empty()));
    bytes.into_iter().flat_map(|bytes| bytes.split(|byte| *byte == 0))
}

/// A tensor, its data beside the model when there are weights and it is long enough.
fn write_tensor<'a>(
    name: &[u8],
    view: &View<'a>,
    weights: Option<&mut Weights<'a>>,
) -> Result<Proto<'a>, ModelError> {
    if view.element.is_none() {
        let name = String::from_utf8_lossy(name);
        return Err(ModelError::Unwritable(format!("tensor {name} of ONNX's type {}", view.number)));
    }
    let mut proto = Proto::new();
    view.dims.iter().for_each(|dim| proto.int(field::TENSOR_DIM, *dim));
    proto.int(field::TENSOR_ELEMENT, view.number.into());
    if !name.is_empty() {
        proto.bytes(field::TENSOR_NAME, name);
    }
    match weights {
        Some(weights) if view.data.len() >= WEIGHT_BYTES => {
            let offset = weights.add(view.data);
            let (offset, length) = (format!("{offset}"), format!("{}", view.data.len()));
            for (key, value) in [("location", WEIGHTS_LOCATION), ("offset", &offset), ("length", &length)] {
                let mut entry = Proto::new();
                entry.bytes(field::ENTRY_KEY, key.as_bytes());
                entry.bytes(field::ENTRY_VALUE, value.as_bytes());
                proto.message(field::TENSOR_EXTERNAL, &entry);
            }
            proto.int(field::TENSOR_LOCATION, 1);
        }
        Some(_) => proto.reference(field::TENSOR_DATA, view.data),
        None => {}
    }
    Ok(proto)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_told_apart_by_their_zero_bytes() {
        let list = |bytes: &'static [u8]| texts(bytes).collect::<Vec<_>>();
        assert_eq!(list(b"Sigmoid\0Tanh\0"), [&b"Sigmoid"[..], b"Tanh"]);
        assert_eq!(list(b"a\0\0b\0"), [&b"a"[..], b"", b"b"]);
        assert_eq!(list(b"a\0b"), [&b"a"[..], b"b"]);
        assert_eq!(list(b"\0"), [b""]);
        assert_eq!(list(b""), [&b""[..]; 0]);
    }

    #[test]
    fn weights_stand_on_multiples_of_64() {
        let mut weights = Weights::default();
        assert_eq!((weights.add(&[1; 10]), weights.add(&[2; 64]), weights.add(&[3; 1])), (0, 64, 128));
        assert_eq!(weights.bytes, 129);
        assert_eq!(weights.pieces.iter().map(|(space, _)| *space).collect::<Vec<_>>(), [0, 54, 0]);
    }

    #[test]
    fn the_tail_names_every_input_with_its_shape() {
        let port =
            Port { name: "x".into(), element: Element::F32, dims: Some(vec![Dim::Free, Dim::Fixed(3)]) };
        let tail = input_tail(&[port]);
        let expected = [
            &[0x3a, 24, 0x5a, 22, 0x0a, 1, b'x'][..], // graph, input, name
            &[0x12, 17, 0x0a, 15, 0x08, 1],           // type, tensor, float
            &[0x12, 11, 0x0a, 5, 0x12, 3, b'x', b'.', b'0', 0x0a, 2, 0x08, 3], // shape
        ];
        assert_eq!(tail, expected.concat());
        assert_eq!(input_tail(&[]), [0x3a, 0]);
    }
}
