// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which of the supported nodes become one: groups that no path leaves and comes back to. Pure.
//!
//! Every node gets a depth that rises whenever a path goes from a supported node to an unsupported one or back;
//! supported nodes have even depths, others odd ones. All supported nodes of one depth are a group: a path between two of
//! them that led through another node would have raised the depth.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// A node, in an order in which none comes before what it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    /// Whether the host can run it.
    pub(crate) is_supported: bool,
    /// The nodes whose values it takes, by their places in the list.
    pub(crate) needs: Vec<usize>,
}

/// The groups, each with its nodes' places in order. `None` when a node comes before what it needs.
pub(crate) fn groups(items: &[Item]) -> Option<Vec<Vec<usize>>> {
    let mut depths = Vec::with_capacity(items.len());
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (place, item) in items.iter().enumerate() {
        let mut depth = 0_u32;
        for need in &item.needs {
            // Only what came before has a depth.
            depth = depth.max(*depths.get(*need)?);
        }
        depth += u32::from(depth.is_multiple_of(2) != item.is_supported);
        depths.push(depth);
        if item.is_supported {
            groups.entry(depth).or_default().push(place);
        }
    }
    Some(groups.into_values().collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn item(is_supported: bool, needs: &[usize]) -> Item {
        Item { is_supported, needs: needs.to_vec() }
    }

    #[test]
    fn a_chain_of_supported_nodes_is_one_group() {
        assert_eq!(groups(&[item(true, &[]), item(true, &[0]), item(true, &[1])]), Some(vec![vec![0, 1, 2]]));
    }

    #[test]
    fn an_unsupported_node_splits_what_is_before_and_behind_it() {
        let items = [item(true, &[]), item(false, &[0]), item(true, &[1]), item(true, &[0])];
        assert_eq!(groups(&items), Some(vec![vec![0, 3], vec![2]]));
    }

    #[test]
    fn a_node_before_what_it_needs_is_no_order() {
        assert_eq!(groups(&[item(true, &[1]), item(true, &[])]), None);
        assert_eq!(groups(&[item(true, &[0])]), None);
    }

    fn graph() -> impl Strategy<Value = Vec<Item>> {
        let node = (any::<bool>(), prop::collection::vec(any::<prop::sample::Index>(), 0..4));
        prop::collection::vec(node, 1..40).prop_map(|nodes| {
            let place = |(place, (is_supported, needs)): (usize, (bool, Vec<prop::sample::Index>))| Item {
                is_supported,
                needs: if place == 0 {
                    Vec::new()
                } else {
                    needs.iter().map(|need| need.index(place)).collect()
                },
            };
            nodes.into_iter().enumerate().map(place).collect()
        })
    }

    /// Whether a path from the group leads out of it and back.
    fn comes_back(items: &[Item], group: &[usize]) -> bool {
        // Per node: reached from the group by a path that has left it.
        let mut has_left = vec![false; items.len()];
        for (place, item) in items.iter().enumerate() {
            let is_inside = group.contains(&place);
            let reached = item.needs.iter().any(|need| has_left[*need]);
            if is_inside && reached {
                return true;
            }
            has_left[place] = reached || (!is_inside && item.needs.iter().any(|need| group.contains(need)));
        }
        false
    }

    proptest! {
        #[test]
        fn every_supported_node_is_in_one_group_and_no_group_is_left_and_come_back_to(items in graph()) {
            let groups = groups(&items).unwrap();
            let mut all: Vec<usize> = groups.iter().flatten().copied().collect();
            all.sort_unstable();
            let supported: Vec<usize> = (0..items.len()).filter(|place| items[*place].is_supported).collect();
            prop_assert_eq!(all, supported);
            for group in &groups {
                prop_assert!(!comes_back(&items, group), "{:?} of {:?}", group, items);
            }
        }
    }
}
