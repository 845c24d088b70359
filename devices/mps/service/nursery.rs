// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts workers, and keeps one ready for whoever comes next: importing torch takes seconds.
//!
//! ```text
//!            a worker is ready                    a stream comes
//!  no spare ───────────────────► a spare starts, waits ─────────────► it is given away; its warden's word makes another
//!      ▲                                     │ idle, failed, late, crashed
//!      └─────────────────────────────────────┘
//! ```
//! One thread for the whole service, because a worker ends with the thread that started it, and a spare must outlive the
//! container whose stream it came with. A spare has seen no container's bytes, and a user of its own like every worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use lighter_wire::Kind;
use rustix::event::{PollFd, PollFlags};

use super::super::control::{FromWorker, ToWorker, WORKER_VERSION, WorkerConfig};
use super::super::probe::command_for;
use super::Shared;
use super::engines::Found;
use super::live::{Heard, Live, Phase};
use crate::service::wardens::{Ask, Inbox, Mailbox, is_readable, mailbox, wait_for};
use crate::service::{sandbox, spawn};
use crate::system;
use crate::text::{cut, with_causes};

/// The device that needs no device node.
const PROCESSOR: &str = "cpu";
/// More than any device has, where its own memory is the limit.
const NO_LIMIT_BYTES: u64 = 1 << 50;

/// Which worker.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) found: Arc<Found>,
    /// torch's name of the device.
    pub(super) device: String,
}

impl Wanted {
    fn is_the_same(&self, other: &Self) -> bool {
        // The torch of another moment may be another one.
        Arc::ptr_eq(&self.found, &other.found) && self.device == other.device
    }
}

#[derive(Debug)]
enum Own {
    /// A worker, at once.
    Take(Wanted, Sender<Result<Live, String>>),
    /// A spare for later.
    Keep(Wanted),
}

/// The nursery, as the service has it.
#[derive(Debug)]
pub(super) struct Nursery {
    door: Door,
    thread: JoinHandle<()>,
}

/// The nursery, as a warden has it.
#[derive(Debug, Clone)]
pub(super) struct Door(Mailbox<Own>);

impl Nursery {
    pub(super) fn start(shared: Arc<Shared>) -> std::io::Result<Self> {
        let (mailbox, inbox) = mailbox()?;
        let keeper = Keeper { shared, inbox, spare: None };
        let thread = std::thread::Builder::new().name("nursery".to_owned()).spawn(move || keeper.run())?;
        Ok(Self { door: Door(mailbox), thread })
    }

    pub(super) fn door(&self) -> Door {
        self.door.clone()
    }

    /// Ends the spare and the thread, and with the thread whatever it has started.
    pub(super) fn end(self) {
        self.door.0.send(Ask::End(None));
        if self.thread.join().is_err() {
            tracing::error!("the thread that starts workers has panicked");
        }
    }
}

impl Door {
    /// A worker: the spare, or one that has just been started.
    pub(super) fn take(&self, wanted: Wanted) -> Result<Live, String> {
        let (sender, answer) = channel();
        self.0.send(Ask::Own(Own::Take(wanted, sender)));
        answer.recv().unwrap_or_else(|_| Err("the thread that starts workers has ended".to_owned()))
    }

    /// Says that this is a good moment to start a spare.
    pub(super) fn keep(&self, wanted: Wanted) {
        self.0.send(Ask::Own(Own::Keep(wanted)));
    }
}

#[derive(Debug)]
struct Spare {
    wanted: Wanted,
    live: Live,
    /// When a stream came last.
    wanted_at: Instant,
}

#[derive(Debug)]
struct Keeper {
    shared: Arc<Shared>,
    inbox: Inbox<Own>,
    spare: Option<Spare>,
}

impl Keeper {
    fn run(mut self) {
        loop {
            loop {
                match self.inbox.next() {
                    Ok(Ask::Own(Own::Take(wanted, answer))) => {
                        // The warden waits for it, unless it has panicked.
                        let _ = answer.send(self.take(&wanted));
                    }
                    Ok(Ask::Own(Own::Keep(wanted))) => self.keep(wanted),
                    Ok(Ask::End(_)) | Err(TryRecvError::Disconnected) => {
                        return self.drop_spare("the service ends");
                    }
                    Ok(Ask::Stream(..) | Ask::Report(_)) => {}
                    Err(TryRecvError::Empty) => break,
                }
            }
            self.wait();
            self.look_after_spare();
        }
    }

    fn take(&mut self, wanted: &Wanted) -> Result<Live, String> {
        if let Some(spare) = self.spare.take_if(|spare| spare.wanted.is_the_same(wanted)) {
            self.count();
            tracing::debug!(pid = spare.live.process.pid(), "the spare worker is taken");
            return Ok(spare.live);
        }
        start(&self.shared, wanted)
    }

    fn keep(&mut self, wanted: Wanted) {
        if !self.shared.config.spare {
            return;
        }
        let wanted_at = Instant::now();
        if let Some(spare) = &mut self.spare
            && spare.wanted.is_the_same(&wanted)
        {
            spare.wanted_at = wanted_at;
            return;
        }
        self.drop_spare("another one is wanted");
        match start(&self.shared, &wanted) {
            Ok(live) => {
                tracing::debug!(pid = live.process.pid(), device = wanted.device, "spare worker started");
                self.spare = Some(Spare { wanted, live, wanted_at });
                self.count();
            }
            Err(reason) => tracing::warn!(reason, "no spare worker"),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let spare = self.spare.as_ref()?;
        let idle = spare.wanted_at + self.shared.config.spare_idle();
        Some(spare.live.deadline().map_or(idle, |deadline| deadline.min(idle)))
    }

    fn wait(&mut self) {
        let mut fds = vec![PollFd::new(self.inbox.wake(), PollFlags::IN)];
        if let Some(spare) = &self.spare {
            fds.extend(live_fds(&spare.live));
        }
        wait_for(&mut fds, self.deadline());
        if fds.first().is_some_and(|fd| !fd.revents().is_empty()) {
            self.inbox.reset();
        }
    }

    /// Takes in what the spare says; whatever is wrong with it, it goes.
    fn look_after_spare(&mut self) {
        let Some(spare) = &mut self.spare else { return };
        for line in spare.live.process.read_lines() {
            tracing::debug!(line, "spare worker says");
        }
        let has_ended = is_readable(spare.live.process.pidfd());
        match spare.live.hear() {
            Heard::Message(FromWorker::Ready(ready)) if ready.version == WORKER_VERSION => {
                spare.live.phase = Phase::Ready;
            }
            Heard::Message(FromWorker::Failed { reason }) => {
                return self.lose_spare(&format!("it cannot open the engine: {}", cut(&reason)));
            }
            Heard::Message(_) => return self.lose_spare("it said what no waiting worker says"),
            Heard::Rubbish(error) => return self.lose_spare(&with_causes(&error)),
            Heard::End => return self.lose_spare("it ended"),
            Heard::Nothing if has_ended => return self.lose_spare("it ended"),
            Heard::Nothing => {}
        }
        let now = Instant::now();
        if spare.live.deadline().is_some_and(|deadline| deadline <= now) {
            self.lose_spare("it was not ready in time");
        } else if spare.wanted_at + self.shared.config.spare_idle() <= now {
            self.drop_spare("it was idle");
        }
    }

    fn lose_spare(&mut self, what: &str) {
        let Some(mut spare) = self.spare.take() else { return };
        self.count();
        let text = format!("spare worker broke: {what}{}", spare.live.process.obituary());
        tracing::warn!("{text}");
        self.shared.trouble(text);
    }

    fn drop_spare(&mut self, why: &str) {
        let Some(spare) = self.spare.take() else { return };
        self.count();
        tracing::debug!(pid = spare.live.process.pid(), "spare worker ended: {why}");
    }

    fn count(&self) {
        self.shared.spares.store(u64::from(self.spare.is_some()), Ordering::Relaxed);
    }
}

/// What is to be watched of a worker: its words, its end, its standard error.
pub(super) fn live_fds(live: &Live) -> impl Iterator<Item = PollFd<'_>> {
    let process = &live.process;
    let watched: [Option<&OwnedFd>; 3] = [Some(process.control()), Some(process.pidfd()), process.stderr()];
    watched.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN))
}

/// Starts a worker: its restrictions, its first message.
fn start(shared: &Shared, wanted: &Wanted) -> Result<Live, String> {
    let config = &shared.config;
    let Some(start) = &wanted.found.start else { return Err("there is no torch".to_owned()) };
    let on_processor = wanted.device == PROCESSOR;
    let host_limit = if on_processor { system::memory_bytes() / 2 } else { NO_LIMIT_BYTES };
    let max_bytes = config.max_bytes_per_stream.unwrap_or(host_limit);
    let sandbox = if config.sandbox {
        let prepared = sandbox::prepare(&sandbox::Needs {
            kind: Kind::Mps,
            program: start.program.file(),
            folders: &start.torch.folders,
            own_folder: None,
            on_processor,
            max_bytes,
            apart: false,
        });
        Some(prepared.map_err(|error| format!("its worker cannot be restricted: {}", with_causes(&error)))?)
    } else {
        None
    };
    let command = command_for(&start.program, &start.torch.executable, config);
    let worker = spawn::spawn(&start.program, command, sandbox).map_err(|error| with_causes(&error))?;
    let live = Live::new(worker, Instant::now() + config.start_limit());
    let configure = ToWorker::Configure(WorkerConfig {
        version: WORKER_VERSION,
        device: wanted.device.clone(),
        threads: config.threads.or_else(system::processors).unwrap_or(1),
        max_bytes,
        max_storages: config.max_storages_per_stream,
        max_signatures: config.max_signatures_per_stream,
    });
    live.say(&configure).map_err(|error| format!("its worker takes no message: {}", with_causes(&error)))?;
    Ok(live)
}
