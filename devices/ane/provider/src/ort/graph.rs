// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading a graph: nodes, the values between them, and their types.
#![allow(unsafe_code)]

use alloc::string::String;
use alloc::vec::Vec;
use core::ffi::CStr;
use core::marker::PhantomData;
use core::ptr::{NonNull, null};

use ort_sys::{OrtGraph, OrtNode, OrtStatusPtr, OrtValueInfo};

use super::attribute::Attribute;
use super::tensor::Constant;
use super::{Ort, Status, text};

const ONNX_TYPE_TENSOR: i32 = 1;

/// A graph, for the length of a call.
#[derive(Clone, Copy)]
pub(crate) struct Graph<'a> {
    ort: Ort,
    raw: NonNull<OrtGraph>,
    call: PhantomData<&'a OrtGraph>,
}

/// A node of a graph.
#[derive(Clone, Copy)]
pub(crate) struct Node<'a> {
    ort: Ort,
    raw: NonNull<OrtNode>,
    call: PhantomData<&'a OrtNode>,
}

/// A value that a node makes or takes.
#[derive(Clone, Copy)]
pub(crate) struct Edge<'a> {
    ort: Ort,
    raw: NonNull<OrtValueInfo>,
    call: PhantomData<&'a OrtValueInfo>,
}

/// The type of a tensor as a graph declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Declared {
    /// ONNX's number of the element type.
    pub(crate) element: i32,
    /// The dimensions; `None` for an unknown rank.
    pub(crate) dims: Option<Vec<DeclaredDim>>,
}

/// A dimension as a graph declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeclaredDim {
    /// A number.
    Fixed(i64),
    /// A name for something that is known with the data; may be empty.
    Named(String),
}

/// A list of the runtime's: how many, then which.
fn list<T>(
    ort: Ort,
    count: impl FnOnce(*mut usize) -> OrtStatusPtr,
    fill: impl FnOnce(*mut *const T, usize) -> OrtStatusPtr,
) -> Result<Vec<*const T>, Status> {
    let mut length = 0;
    ort.check(count(&raw mut length))?;
    let mut items = alloc::vec![null(); length];
    if length > 0 {
        ort.check(fill(items.as_mut_ptr(), length))?;
    }
    Ok(items)
}

impl<'a> Graph<'a> {
    /// # Safety
    /// A graph that the runtime has passed in, for at most as long as its call.
    pub(crate) unsafe fn new(ort: Ort, raw: *const OrtGraph) -> Option<Self> {
        NonNull::new(raw.cast_mut()).map(|raw| Self { ort, raw, call: PhantomData })
    }

    /// Whether it belongs to a node of another graph.
    pub(crate) fn is_nested(&self) -> Result<bool, Status> {
        let mut parent = null();
        // SAFETY: a graph of this call and a place for the answer.
        let status = unsafe { (self.ort.api().Graph_GetParentNode)(self.raw.as_ptr(), &raw mut parent) };
        self.ort.check(status)?;
        Ok(!parent.is_null())
    }

    /// Its name.
    pub(crate) fn name(&self) -> Result<&'a CStr, Status> {
        let mut name = null();
        // SAFETY: a graph of this call and a place for the answer, which lives as long as the graph.
        unsafe {
            self.ort.check((self.ort.api().Graph_GetName)(self.raw.as_ptr(), &raw mut name))?;
            Ok(text(name).unwrap_or_default())
        }
    }

    /// The file that it was read from; empty for one that came as bytes.
    pub(crate) fn path(&self) -> Result<&'a CStr, Status> {
        let mut path = null();
        // SAFETY: a graph of this call and a place for the answer, which lives as long as the graph.
        unsafe {
            self.ort.check((self.ort.api().Graph_GetModelPath)(self.raw.as_ptr(), &raw mut path))?;
            Ok(text(path).unwrap_or_default())
        }
    }

    /// Version of the format that it is written in.
    pub(crate) fn ir_version(&self) -> Result<i64, Status> {
        let mut version = 0;
        // SAFETY: a graph of this call and a place for the answer.
        let status = unsafe { (self.ort.api().Graph_GetOnnxIRVersion)(self.raw.as_ptr(), &raw mut version) };
        self.ort.check(status)?;
        Ok(version)
    }

    /// Domains of operators and their versions.
    pub(crate) fn operator_sets(&self) -> Result<Vec<(&'a CStr, i64)>, Status> {
        let (api, graph) = (self.ort.api(), self.raw.as_ptr());
        let mut versions = Vec::new();
        // SAFETY: a graph of this call and places for the answers; texts live as long as the graph.
        unsafe {
            let domains = list(
                self.ort,
                |count| (api.Graph_GetNumOperatorSets)(graph, count),
                |domains, count| {
                    versions.resize(count, 0);
                    (api.Graph_GetOperatorSets)(graph, domains, versions.as_mut_ptr(), count)
                },
            )?;
            Ok(domains.into_iter().map(|domain| text(domain).unwrap_or_default()).zip(versions).collect())
        }
    }

    /// Its nodes.
    pub(crate) fn nodes(&self) -> Result<Vec<Node<'a>>, Status> {
        let (api, graph) = (self.ort.api(), self.raw.as_ptr());
        // SAFETY: a graph of this call and places for the answers.
        let nodes = unsafe {
            list(
                self.ort,
                |count| (api.Graph_GetNumNodes)(graph, count),
                |nodes, count| (api.Graph_GetNodes)(graph, nodes, count),
            )?
        };
        Ok(nodes.into_iter().filter_map(|node| Node::of(self.ort, node)).collect())
    }

    /// Its constant and overridable values.
    pub(crate) fn initializers(&self) -> Result<Vec<Edge<'a>>, Status> {
        let (api, graph) = (self.ort.api(), self.raw.as_ptr());
        // SAFETY: a graph of this call and places for the answers.
        let edges = unsafe {
            list(
                self.ort,
                |count| (api.Graph_GetNumInitializers)(graph, count),
                |edges, count| (api.Graph_GetInitializers)(graph, edges, count),
            )?
        };
        Ok(edges.into_iter().filter_map(|edge| Edge::of(self.ort, edge)).collect())
    }
}

impl<'a> Node<'a> {
    /// # Safety
    /// A node that the runtime has passed in, for at most as long as its call.
    pub(crate) unsafe fn new(ort: Ort, raw: *const OrtNode) -> Option<Self> {
        Self::of(ort, raw)
    }

    fn of(ort: Ort, raw: *const OrtNode) -> Option<Self> {
        NonNull::new(raw.cast_mut()).map(|raw| Self { ort, raw, call: PhantomData })
    }

    pub(crate) const fn raw(&self) -> *const OrtNode {
        self.raw.as_ptr()
    }

    /// Its number in the graph.
    pub(crate) fn id(&self) -> Result<usize, Status> {
        let mut id = 0;
        // SAFETY: a node of this call and a place for the answer.
        let status = unsafe { (self.ort.api().Node_GetId)(self.raw.as_ptr(), &raw mut id) };
        self.ort.check(status)?;
        Ok(id)
    }

    fn name_of(
        &self,
        which: unsafe extern "system" fn(*const OrtNode, *mut *const core::ffi::c_char) -> OrtStatusPtr,
    ) -> Result<&'a CStr, Status> {
        let mut name = null();
        // SAFETY: a node of this call and a place for the answer, which lives as long as the node; null stands for none.
        unsafe {
            self.ort.check(which(self.raw.as_ptr(), &raw mut name))?;
            Ok(text(name).unwrap_or_default())
        }
    }

    /// Its name; may be empty.
    pub(crate) fn name(&self) -> Result<&'a CStr, Status> {
        self.name_of(self.ort.api().Node_GetName)
    }

    /// What it does.
    pub(crate) fn operator(&self) -> Result<&'a CStr, Status> {
        self.name_of(self.ort.api().Node_GetOperatorType)
    }

    /// Whose operator that is; empty for ONNX's own.
    pub(crate) fn domain(&self) -> Result<&'a CStr, Status> {
        self.name_of(self.ort.api().Node_GetDomain)
    }

    /// The provider that has it already; empty for none.
    pub(crate) fn provider(&self) -> Result<&'a CStr, Status> {
        self.name_of(self.ort.api().Node_GetEpName)
    }

    /// How many graphs it holds.
    pub(crate) fn subgraphs(&self) -> Result<usize, Status> {
        let mut count = 0;
        // SAFETY: a node of this call and a place for the answer.
        let status = unsafe { (self.ort.api().Node_GetNumSubgraphs)(self.raw.as_ptr(), &raw mut count) };
        self.ort.check(status)?;
        Ok(count)
    }

    fn edges(&self, edges: Vec<*const OrtValueInfo>) -> Vec<Option<Edge<'a>>> {
        edges.into_iter().map(|edge| Edge::of(self.ort, edge)).collect()
    }

    /// What it takes; `None` where an optional one is left out.
    pub(crate) fn inputs(&self) -> Result<Vec<Option<Edge<'a>>>, Status> {
        let (api, node) = (self.ort.api(), self.raw.as_ptr());
        // SAFETY: a node of this call and places for the answers.
        let edges = unsafe {
            list(
                self.ort,
                |count| (api.Node_GetNumInputs)(node, count),
                |edges, count| (api.Node_GetInputs)(node, edges, count),
            )?
        };
        Ok(self.edges(edges))
    }

    /// What its subgraphs take from around it.
    pub(crate) fn implicit_inputs(&self) -> Result<Vec<Option<Edge<'a>>>, Status> {
        let (api, node) = (self.ort.api(), self.raw.as_ptr());
        // SAFETY: a node of this call and places for the answers.
        let edges = unsafe {
            list(
                self.ort,
                |count| (api.Node_GetNumImplicitInputs)(node, count),
                |edges, count| (api.Node_GetImplicitInputs)(node, edges, count),
            )?
        };
        Ok(self.edges(edges))
    }

    /// What it makes; `None` where an optional one is left out.
    pub(crate) fn outputs(&self) -> Result<Vec<Option<Edge<'a>>>, Status> {
        let (api, node) = (self.ort.api(), self.raw.as_ptr());
        // SAFETY: a node of this call and places for the answers.
        let edges = unsafe {
            list(
                self.ort,
                |count| (api.Node_GetNumOutputs)(node, count),
                |edges, count| (api.Node_GetOutputs)(node, edges, count),
            )?
        };
        Ok(self.edges(edges))
    }

    /// Its attributes.
    pub(crate) fn attributes(&self) -> Result<Vec<Attribute<'a>>, Status> {
        let (api, node) = (self.ort.api(), self.raw.as_ptr());
        // SAFETY: a node of this call and places for the answers.
        let attributes = unsafe {
            list(
                self.ort,
                |count| (api.Node_GetNumAttributes)(node, count),
                |attributes, count| (api.Node_GetAttributes)(node, attributes, count),
            )?
        };
        Ok(attributes.into_iter().filter_map(|attribute| Attribute::of(self.ort, attribute)).collect())
    }
}

impl<'a> Edge<'a> {
    fn of(ort: Ort, raw: *const OrtValueInfo) -> Option<Self> {
        NonNull::new(raw.cast_mut()).map(|raw| Self { ort, raw, call: PhantomData })
    }

    /// Its name, which other nodes know it by.
    pub(crate) fn name(&self) -> Result<&'a CStr, Status> {
        let mut name = null();
        // SAFETY: a value of this call and a place for the answer, which lives as long as the graph.
        unsafe {
            self.ort.check((self.ort.api().GetValueInfoName)(self.raw.as_ptr(), &raw mut name))?;
            Ok(text(name).unwrap_or_default())
        }
    }

    /// The node that makes it; `None` for inputs and initialisers.
    pub(crate) fn producer(&self) -> Result<Option<Node<'a>>, Status> {
        let (mut node, mut index) = (null(), 0);
        // SAFETY: a value of this call and places for the answers.
        self.ort.check(unsafe {
            (self.ort.api().ValueInfo_GetValueProducer)(self.raw.as_ptr(), &raw mut node, &raw mut index)
        })?;
        Ok(Node::of(self.ort, node))
    }

    /// Its data, if it is an initialiser.
    pub(crate) fn initializer(&self) -> Result<Option<Constant<'a>>, Status> {
        let mut value = null();
        // SAFETY: a value of this call and a place for the answer, which the graph owns.
        unsafe {
            self.ort
                .check((self.ort.api().ValueInfo_GetInitializerValue)(self.raw.as_ptr(), &raw mut value))?;
            NonNull::new(value.cast_mut()).map(|value| Constant::borrowed(self.ort, value)).transpose()
        }
    }

    /// Its type; `None` when it is no tensor, or nothing is known of it.
    pub(crate) fn declared(&self) -> Result<Option<Declared>, Status> {
        let (ort, api) = (self.ort, self.ort.api());
        let (mut info, mut kind, mut tensor) = (null(), 0_i32, null());
        // SAFETY: a value of this call and places for the answers, which the value owns. The runtime writes numbers of 32
        // bits where its enumerations are asked for.
        unsafe {
            ort.check((api.GetValueInfoTypeInfo)(self.raw.as_ptr(), &raw mut info))?;
            if info.is_null() {
                return Ok(None);
            }
            ort.check((api.GetOnnxTypeFromTypeInfo)(info, (&raw mut kind).cast()))?;
            if kind != ONNX_TYPE_TENSOR {
                return Ok(None);
            }
            ort.check((api.CastTypeInfoToTensorInfo)(info, &raw mut tensor))?;
            if tensor.is_null() {
                return Ok(None);
            }
            let mut element = 0_i32;
            ort.check((api.GetTensorElementType)(tensor, (&raw mut element).cast()))?;
            if !(api.TensorTypeAndShape_HasShape)(tensor) {
                return Ok(Some(Declared { element, dims: None }));
            }
            let mut rank = 0;
            ort.check((api.GetDimensionsCount)(tensor, &raw mut rank))?;
            let (mut numbers, mut names) = (alloc::vec![0; rank], alloc::vec![null(); rank]);
            if rank > 0 {
                ort.check((api.GetDimensions)(tensor, numbers.as_mut_ptr(), rank))?;
                ort.check((api.GetSymbolicDimensions)(tensor, names.as_mut_ptr(), rank))?;
            }
            let dims = numbers.into_iter().zip(names).map(|(number, name)| {
                if number >= 0 {
                    return DeclaredDim::Fixed(number);
                }
                DeclaredDim::Named(text(name).and_then(|name| name.to_str().ok()).unwrap_or_default().into())
            });
            Ok(Some(Declared { element, dims: Some(dims.collect()) }))
        }
    }
}
