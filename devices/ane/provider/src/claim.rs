// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which nodes of a graph the host is asked to run.
//!
//! Left in the container: graphs within nodes and the nodes that hold them, nodes that another provider has (this one's
//! own among them: ONNX Runtime asks again after it has unfolded a constant `If`), operators of domains that the host's
//! runtime does not come with, random numbers, values that do not travel, attention where the two runtimes differ in
//! version (its meaning has moved between releases), and groups with too little work in them.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use lighter_frames::{Element, MAX_RANK};

use crate::ort::Status;
use crate::ort::attribute::Kind;
use crate::ort::graph::{Declared, DeclaredDim, Edge, Graph, Node};
use crate::partition::{self, Item};
use crate::work::{self, Shape};

/// What decides beside the graph itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    /// The host's runtime is of another version, or of one that it does not tell.
    pub(crate) is_host_different: bool,
    /// Least work of a group, in multiplications.
    pub(crate) min_work: u64,
}

/// What is claimed of a graph.
#[derive(Default)]
pub(crate) struct Claim<'a> {
    /// The nodes that become one, and one, and one.
    pub(crate) groups: Vec<Vec<Node<'a>>>,
    /// Nodes of the graph.
    pub(crate) nodes: usize,
}

/// Decides about a graph.
pub(crate) fn claim<'a>(graph: &Graph<'a>, rules: Rules) -> Result<Claim<'a>, Status> {
    if graph.is_nested()? {
        return Ok(Claim::default());
    }
    let nodes = graph.nodes()?;
    let mut places = BTreeMap::new();
    for (place, node) in nodes.iter().enumerate() {
        places.insert(node.id()?, place);
    }
    let (mut items, mut works) = (Vec::new(), Vec::new());
    for node in &nodes {
        let inputs = node.inputs()?;
        let mut needs = Vec::new();
        for edge in inputs.iter().chain(&node.implicit_inputs()?).flatten() {
            if let Some(producer) = edge.producer()? {
                needs.extend(places.get(&producer.id()?));
            }
        }
        let outputs = node.outputs()?;
        let is_supported = is_supported(node, &inputs, &outputs, rules)?;
        works.push(if is_supported { work(node, &inputs, &outputs)? } else { 0 });
        items.push(Item { is_supported, needs });
    }
    let groups = partition::groups(&items).unwrap_or_default().into_iter().filter(|group| {
        let works = group.iter().filter_map(|place| works.get(*place));
        works.fold(0, |sum: u64, work| sum.saturating_add(*work)) >= rules.min_work
    });
    let groups =
        groups.map(|group| group.into_iter().filter_map(|place| nodes.get(place).copied()).collect());
    Ok(Claim { groups: groups.collect(), nodes: nodes.len() })
}

fn is_supported(
    node: &Node<'_>,
    inputs: &[Option<Edge<'_>>],
    outputs: &[Option<Edge<'_>>],
    rules: Rules,
) -> Result<bool, Status> {
    if node.subgraphs()? > 0 || !node.provider()?.is_empty() {
        return Ok(false);
    }
    let (domain, operator) = (node.domain()?.to_bytes(), node.operator()?.to_bytes());
    if !is_known(domain, operator) || (rules.is_host_different && is_attention(operator)) {
        return Ok(false);
    }
    for edge in inputs.iter().chain(outputs).flatten() {
        if edge.name()?.to_str().is_err() || !edge.declared()?.is_some_and(|declared| travels(&declared)) {
            return Ok(false);
        }
    }
    for attribute in node.attributes()? {
        let is_writable = match attribute.kind()? {
            None => false,
            Some(Kind::Tensor) => match attribute.tensor()? {
                Some(tensor) => tensor.view()?.element.is_some(),
                None => false,
            },
            Some(_) => true,
        };
        if !is_writable {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Operators that every ONNX Runtime comes with, and that give the same for the same.
fn is_known(domain: &[u8], operator: &[u8]) -> bool {
    let is_random = operator.starts_with(b"Random") || matches!(operator, b"Multinomial" | b"Bernoulli");
    let is_shipped = matches!(domain, b"" | b"ai.onnx" | b"ai.onnx.ml" | b"com.microsoft");
    is_shipped && !is_random && operator != b"EPContext"
}

fn is_attention(operator: &[u8]) -> bool {
    operator.ends_with(b"Attention")
}

fn travels(declared: &Declared) -> bool {
    let rank = declared.dims.as_ref().map_or(0, Vec::len);
    Element::from_number(declared.element).is_some() && rank <= MAX_RANK
}

fn work(node: &Node<'_>, inputs: &[Option<Edge<'_>>], outputs: &[Option<Edge<'_>>]) -> Result<u64, Status> {
    let shape = |edge: Option<&Option<Edge<'_>>>| -> Result<Shape, Status> {
        let Some(edge) = edge.and_then(Option::as_ref) else { return Ok(None) };
        Ok(edge.declared()?.and_then(|declared| declared.dims).map(|dims| {
            let known = |dim| match dim {
                DeclaredDim::Fixed(number) => u64::try_from(number).ok(),
                DeclaredDim::Named(_) => None,
            };
            dims.into_iter().map(known).collect()
        }))
    };
    let mut shapes = Vec::with_capacity(inputs.len());
    for edge in inputs {
        shapes.push(shape(Some(edge))?);
    }
    Ok(work::of_node(node.operator()?.to_bytes(), &shapes, &shape(outputs.first())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_that_only_the_containers_runtime_knows_stay_there() {
        assert!(
            is_known(b"", b"Conv")
                && is_known(b"ai.onnx.ml", b"Scaler")
                && is_known(b"com.microsoft", b"FusedConv")
        );
        assert!(!is_known(b"my.company", b"Conv"));
        assert!(
            !is_known(b"", b"RandomNormalLike")
                && !is_known(b"", b"Bernoulli")
                && !is_known(b"", b"Multinomial")
        );
        assert!(!is_known(b"com.microsoft", b"EPContext"));
    }

    #[test]
    fn every_kind_of_attention_is_one() {
        assert!(is_attention(b"Attention") && is_attention(b"GroupQueryAttention"));
        assert!(!is_attention(b"MatMul"));
    }

    #[test]
    fn texts_and_packed_numbers_do_not_travel() {
        let declared = |element, rank| Declared { element, dims: Some(vec![DeclaredDim::Fixed(1); rank]) };
        assert!(travels(&declared(1, 4)) && travels(&declared(16, 0)));
        assert!(!travels(&declared(8, 1)) && !travels(&declared(22, 1)) && !travels(&declared(17, 1)));
        assert!(!travels(&declared(1, 17)));
    }
}
