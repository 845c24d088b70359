// SPDX-License-Identifier: MIT OR Apache-2.0
//! A few threads that run jobs: started when there is work, gone when there is none, so that an idle agent costs nothing.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::lock;

const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs on up to a number of threads; jobs beyond wait in a queue of limited length.
#[derive(Clone)]
pub(crate) struct Pool {
    name: &'static str,
    max_threads: usize,
    max_waiting: usize,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    gone: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// The queue is full, the pool is closed, or the system gives no thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy;

impl Pool {
    pub(crate) fn new(name: &'static str, max_threads: usize, max_waiting: usize) -> Self {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), gone: Condvar::new() };
        Self { name, max_threads, max_waiting, shared: Arc::new(shared) }
    }

    /// Runs the job soon, or gives it up.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) -> Result<(), Busy> {
        let mut state = lock(&self.shared.state);
        if state.closed || state.jobs.len() >= self.max_waiting {
            return Err(Busy);
        }
        state.jobs.push_back(Box::new(job));
        // An idle thread that was woken for an earlier job still counts as idle: jobs are compared, not a flag.
        if state.jobs.len() > state.idle && state.threads < self.max_threads {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new().name(self.name.into()).spawn(move || work(&shared));
            match started {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads == 0 => {
                    state.jobs.pop_back();
                    return Err(Busy);
                }
                Err(_) => {}
            }
        }
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Takes no more jobs, drops those that wait, and waits until the running ones are done or the time is up.
    pub(crate) fn close(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = lock(&self.shared.state);
        state.closed = true;
        let dropped = std::mem::take(&mut state.jobs);
        self.shared.work.notify_all();
        while state.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = match self.shared.gone.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        drop(state);
        drop(dropped);
    }
}

/// Counts a thread out however it ends.
struct Leaving<'a>(&'a Shared);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).threads -= 1;
        self.0.gone.notify_all();
    }
}

fn work(shared: &Shared) {
    let _leaving = Leaving(shared);
    loop {
        let mut state = lock(&shared.state);
        let job = loop {
            if let Some(job) = state.jobs.pop_front() {
                break job;
            }
            if state.closed {
                return;
            }
            state.idle += 1;
            let (woken, waited) = match shared.work.wait_timeout(state, IDLE) {
                Ok(woken) => woken,
                Err(poisoned) => poisoned.into_inner(),
            };
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                return;
            }
        };
        drop(state);
        // A job that panics was one stream or one hook; the thread has others to serve.
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a job of the agent panicked; this is a bug");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn all_jobs_run_on_no_more_threads_than_allowed() {
        let pool = Pool::new("test", 3, 1000);
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, all) = mpsc::channel();
        for _ in 0..200 {
            let (running, most, done) = (Arc::clone(&running), Arc::clone(&most), done.clone());
            pool.run(move || {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
                done.send(()).unwrap();
            })
            .unwrap();
        }
        drop(done);
        assert_eq!(all.iter().count(), 200);
        assert!(most.load(Ordering::SeqCst) <= 3);
        pool.close(Duration::from_secs(5));
        assert_eq!(pool.run(|| {}), Err(Busy));
    }

    #[test]
    fn a_panicking_job_does_not_take_the_pool_along_and_a_full_queue_says_so() {
        let pool = Pool::new("test", 1, 2);
        pool.run(|| panic!("on purpose")).unwrap();
        let (hold, held) = mpsc::channel::<()>();
        let (started, start) = mpsc::channel();
        while pool
            .run({
                let started = started.clone();
                move || started.send(()).unwrap()
            })
            .is_err()
        {}
        start.recv().unwrap();
        pool.run(move || {
            started.send(()).unwrap();
            let _ = held.recv();
        })
        .unwrap();
        start.recv().unwrap();
        pool.run(|| {}).unwrap();
        pool.run(|| {}).unwrap();
        assert_eq!(pool.run(|| {}), Err(Busy));
        drop(hold);
        pool.close(Duration::from_secs(5));
    }
}
