// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is found out once, when it is first asked for: the engines of the host.
//!
//! What was found stays; that nothing was found is asked again after a moment, so that `lighter setup` takes effect
//! without a restart.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long "there is none" is believed.
const MISSING_LASTS: Duration = Duration::from_secs(5);

/// An answer that is kept.
#[derive(Debug)]
pub(crate) struct Known<T>(Mutex<Option<(Instant, T)>>);

// Not derived: that would ask the same of the answer.
impl<T> Default for Known<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Known<T> {
    /// The answer; finds it out when it is not known. Others who ask meanwhile wait for the same answer.
    pub(crate) fn get(&self, was_found: impl FnOnce(&T) -> bool, find_out: impl FnOnce() -> T) -> T {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, answer)) = known.as_ref()
            && (was_found(answer) || when.elapsed() < MISSING_LASTS)
        {
            return answer.clone();
        }
        let answer = find_out();
        *known = Some((Instant::now(), answer.clone()));
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_stays_and_what_was_not_is_believed_for_a_moment() {
        let known = Known::<Option<u32>>::default();
        assert_eq!(known.get(Option::is_some, || None), None);
        assert_eq!(known.get(Option::is_some, || Some(1)), None, "not asked again at once");
        let past = Instant::now().checked_sub(MISSING_LASTS).unwrap();
        known.0.lock().unwrap().as_mut().unwrap().0 = past;
        assert_eq!(known.get(Option::is_some, || Some(2)), Some(2));
        known.0.lock().unwrap().as_mut().unwrap().0 = past;
        assert_eq!(known.get(Option::is_some, || Some(3)), Some(2), "what was found is not asked again");
    }
}
