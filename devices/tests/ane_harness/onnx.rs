// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small ONNX models, written by hand as the library in a container writes them: no inputs in the graph, large
//! tensors as external data in the model's own weights.

use std::os::fd::OwnedFd;

use lighter_devices::ane::control::{Model, ModelHash};
use lighter_frames::{Dim, Element, Port};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Fields of a protobuf message.
#[derive(Default, Clone)]
pub(crate) struct Proto(pub(crate) Vec<u8>);

impl Proto {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(crate) fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    pub(crate) fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn text(self, field: u64, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    pub(crate) fn message(self, field: u64, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }
}

/// A node.
pub(crate) fn node(op: &str, inputs: &[&str], outputs: &[&str], attributes: &[Proto]) -> Proto {
    let mut node = Proto::default();
    for input in inputs {
        node = node.text(1, input);
    }
    for output in outputs {
        node = node.text(2, output);
    }
    node = node.text(4, op);
    for attribute in attributes {
        node = node.message(5, attribute);
    }
    node
}

/// An attribute with a number.
pub(crate) fn attribute(name: &str, value: u64) -> Proto {
    Proto::default().text(1, name).number(3, value).number(20, 2)
}

/// A tensor with its data in it.
pub(crate) fn tensor(name: &str, element: Element, dims: &[u64], data: &[u8]) -> Proto {
    header(name, element, dims).bytes(9, data)
}

fn header(name: &str, element: Element, dims: &[u64]) -> Proto {
    let mut tensor = Proto::default();
    for dim in dims {
        tensor = tensor.number(1, *dim);
    }
    tensor.number(2, element.number().into()).text(8, name)
}

fn pair(key: &str, value: &str) -> Proto {
    Proto::default().text(1, key).text(2, value)
}

/// A tensor whose data stand elsewhere.
pub(crate) fn external(
    name: &str,
    element: Element,
    dims: &[u64],
    location: &str,
    offset: u64,
    length: u64,
) -> Proto {
    header(name, element, dims)
        .message(13, &pair("location", location))
        .message(13, &pair("offset", &offset.to_string()))
        .message(13, &pair("length", &length.to_string()))
        .number(14, 1)
}

fn value_info(port: &Port) -> Proto {
    let mut kind = Proto::default().number(1, port.element.number().into());
    if let Some(dims) = &port.dims {
        let mut shape = Proto::default();
        for dim in dims {
            let one = match dim {
                Dim::Fixed(value) => Proto::default().number(1, *value),
                Dim::Free => Proto::default(),
            };
            shape = shape.message(1, &one);
        }
        kind = kind.message(2, &shape);
    }
    Proto::default().text(1, &port.name).message(2, &Proto::default().message(1, &kind))
}

/// A port with a fixed or free (`None`) dimension each.
pub(crate) fn port(name: &str, element: Element, dims: &[Option<u64>]) -> Port {
    let dim = |dim: &Option<u64>| dim.map_or(Dim::Free, Dim::Fixed);
    Port { name: name.to_owned(), element, dims: Some(dims.iter().map(dim).collect()) }
}

/// A model as a container sends it.
#[derive(Clone)]
pub(crate) struct TestModel {
    pub(crate) hash: ModelHash,
    pub(crate) proto: Vec<u8>,
    pub(crate) weights: Vec<u8>,
    pub(crate) inputs: Vec<Port>,
    pub(crate) outputs: Vec<Port>,
}

impl TestModel {
    pub(crate) fn new(
        nodes: &[Proto],
        initializers: &[Proto],
        weights: &[u8],
        inputs: &[Port],
        outputs: &[Port],
    ) -> Self {
        let mut graph = Proto::default().text(2, "g");
        for node in nodes {
            graph = graph.message(1, node);
        }
        for initializer in initializers {
            graph = graph.message(5, initializer);
        }
        for output in outputs {
            graph = graph.message(12, &value_info(output));
        }
        let opset = Proto::default().text(1, "").number(2, 17);
        let model = Proto::default().number(1, 8).message(8, &opset).message(7, &graph);
        Self::from_proto(model.0, weights, inputs, outputs)
    }

    pub(crate) fn from_proto(proto: Vec<u8>, weights: &[u8], inputs: &[Port], outputs: &[Port]) -> Self {
        let named = format!("{proto:?}{inputs:?}{outputs:?}{}", weights.len());
        Self {
            hash: ModelHash(*blake3::hash(named.as_bytes()).as_bytes()),
            proto,
            weights: weights.to_vec(),
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
        }
    }

    /// The message and the sealed file.
    pub(crate) fn message(&self) -> (Model, OwnedFd) {
        let offset = self.proto.len().next_multiple_of(4096);
        let mut file = self.proto.clone();
        file.resize(offset, 0);
        file.extend_from_slice(&self.weights);
        let memfd = memfd(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW);
        let (proto, weights) = (self.proto.len() as u64, self.weights.len() as u64);
        (super::model_message(self.hash, proto, weights, &self.inputs, &self.outputs), memfd)
    }

    /// The whole ModelProto, with its inputs, for a session without a worker.
    pub(crate) fn whole(&self) -> Vec<u8> {
        let mut graph = Proto::default();
        for input in &self.inputs {
            graph = graph.message(11, &value_info(input));
        }
        [self.proto.clone(), Proto::default().message(7, &graph).0].concat()
    }
}

/// A memfd with this content and these seals.
pub(crate) fn memfd(content: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, content.len() as u64).unwrap();
    let mut at = 0;
    while at < content.len() {
        at += rustix::io::pwrite(&file, &content[at..], at as u64).unwrap();
    }
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// `y = x + 1`, any length.
pub(crate) fn plus_one() -> TestModel {
    let one = tensor("one", Element::F32, &[], &1.0_f32.to_le_bytes());
    let ports = |name| [port(name, Element::F32, &[None])];
    TestModel::new(&[node("Add", &["x", "one"], &["y"], &[])], &[one], &[], &ports("x"), &ports("y"))
}

/// `y = x` of one element type, any shape of two dimensions.
pub(crate) fn identity(element: Element) -> TestModel {
    let ports = |name| [port(name, element, &[None, None])];
    TestModel::new(&[node("Identity", &["x"], &["y"], &[])], &[], &[], &ports("x"), &ports("y"))
}

/// `y = x · w`, with `w` (n × n, all `value`) in the weights behind 64 other bytes.
pub(crate) fn product(n: u64, value: f32) -> TestModel {
    let count = usize::try_from(n * n).unwrap();
    let mut weights = vec![0xff; 64];
    weights.extend(value.to_le_bytes().repeat(count));
    let w = external("w1", Element::F32, &[n, n], "w", 64, n * n * 4);
    let ports = |name| [port(name, Element::F32, &[None, Some(n)])];
    let product = node("MatMul", &["x", "w1"], &["y"], &[]);
    TestModel::new(&[product], &[w], &weights, &ports("x"), &ports("y"))
}

/// `y = table[index]`, five rows of two.
pub(crate) fn rows() -> TestModel {
    let data: Vec<u8> = (0..10_u8).flat_map(|value| f32::from(value).to_le_bytes()).collect();
    let table = tensor("table", Element::F32, &[5, 2], &data);
    let gather = node("Gather", &["table", "index"], &["y"], &[]);
    TestModel::new(
        &[gather],
        &[table],
        &[],
        &[port("index", Element::I64, &[None])],
        &[port("y", Element::F32, &[None, Some(2)])],
    )
}

/// Goes round `trips` times, with `y = x + 1` in each.
pub(crate) fn rounds() -> TestModel {
    let scalar = |name: &str, element: Element| port(name, element, &[]);
    let one = tensor("one", Element::F32, &[], &1.0_f32.to_le_bytes());
    let body = Proto::default()
        .message(1, &node("Identity", &["go"], &["on"], &[]))
        .message(1, &node("Add", &["sum", "one"], &["more"], &[]))
        .text(2, "body")
        .message(5, &one)
        .message(11, &value_info(&scalar("round", Element::I64)))
        .message(11, &value_info(&scalar("go", Element::Bool)))
        .message(11, &value_info(&scalar("sum", Element::F32)))
        .message(12, &value_info(&scalar("on", Element::Bool)))
        .message(12, &value_info(&scalar("more", Element::F32)));
    let body = Proto::default().text(1, "body").message(6, &body).number(20, 5);
    let begin = tensor("begin", Element::F32, &[], &0.0_f32.to_le_bytes());
    TestModel::new(
        &[node("Loop", &["trips", "", "begin"], &["y"], &[body])],
        &[begin],
        &[],
        &[scalar("trips", Element::I64)],
        &[scalar("y", Element::F32)],
    )
}

/// Large in, small out, nothing to compute: the first 1,024 floats of 150,528.
pub(crate) fn slice() -> TestModel {
    let numbers = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let constant = |name, value| tensor(name, Element::I64, &[1], &numbers(&[value]));
    TestModel::new(
        &[node("Slice", &["x", "start", "end", "axis"], &["y"], &[])],
        &[constant("start", 0), constant("end", 1024), constant("axis", 1)],
        &[],
        &[port("x", Element::F32, &[Some(1), Some(150_528)])],
        &[port("y", Element::F32, &[Some(1), Some(1024)])],
    )
}
