// SPDX-License-Identifier: MIT OR Apache-2.0
//! What went wrong lately, for a service's report. Pure.

use std::collections::VecDeque;

/// Troubles that a report shows.
const MAX_TROUBLES: usize = 32;

/// The latest things that went wrong, oldest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Troubles(VecDeque<String>);

impl Troubles {
    /// Adds one; the oldest goes when there are too many.
    pub(crate) fn add(&mut self, text: String) {
        if self.0.len() == MAX_TROUBLES {
            self.0.pop_front();
        }
        self.0.push_back(text);
    }

    /// All of them.
    pub(crate) fn list(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn troubles_are_bounded_and_the_latest_stay() {
        let mut troubles = Troubles::default();
        for number in 0..100 {
            troubles.add(number.to_string());
        }
        assert_eq!(troubles.list().len(), MAX_TROUBLES);
        assert_eq!(troubles.list().last().map(String::as_str), Some("99"));
    }
}
