// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model that has been compiled, that is: handed to the host. Runs it there, and in the container when it must.
//!
//! ```text
//! host ──run──► answered
//!   │ broken, busy        again on another connection, for about a second and a half
//!   │ still broken        in the container, and a look at the host again after a second, two, … thirty
//!   │ "not with these"    this run in the container
//!   │ "not this model"    in the container, for good
//!   ▼
//! container ──► answered, or the runtime's own error
//! ```
//! What changes is said in one line each, not per run.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lighter_frames::{Element, Tensor};

use crate::host::{Connection, Host, Input, Outputs, Placing, Remedy, Trouble};
use crate::local::{self, LocalError};
use crate::log;
use crate::ort::context::Context;
use crate::ort::tensor::View;
use crate::ort::{Ort, Status};
use crate::package::Package;
use crate::process::PerProcess;
use crate::sys::wait::{now_ms, sleep_ms};

/// Waits between attempts while a host that was there may be starting anew.
const PATIENCE_MS: [u32; 7] = [0, 20, 50, 100, 200, 400, 800];
/// First and longest time without looking at a host that is away.
const AWAY_MS: u64 = 1000;
const MAX_AWAY_MS: u64 = 30_000;

/// The model.
pub(crate) struct Compiled {
    ort: Ort,
    host: Host,
    package: Package,
    processes: PerProcess,
    /// The host said that it cannot run this model.
    is_refused: AtomicBool,
    /// When to look at a host again that is away; 0 while it is there.
    look_at_ms: AtomicU64,
    /// For how long it was last not looked at.
    away_ms: AtomicU64,
    has_said_not_with_these: AtomicBool,
    runs: Runs,
}

/// What ran where.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    on_host: AtomicU64,
    in_container: AtomicU64,
}

impl fmt::Display for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (on_host, in_container) =
            (self.on_host.load(Ordering::Relaxed), self.in_container.load(Ordering::Relaxed));
        write!(f, "{on_host} runs on the host, {in_container} in the container")
    }
}

impl Compiled {
    /// Hands a model to the host, over a connection that is open already or a new one. A host that cannot take it is no
    /// error: the container can.
    pub(crate) fn new(ort: Ort, host: Host, package: Package, connection: Option<Connection>) -> Self {
        let compiled = Self {
            ort,
            host,
            package,
            processes: PerProcess::new(),
            is_refused: AtomicBool::new(false),
            look_at_ms: AtomicU64::new(0),
            away_ms: AtomicU64::new(0),
            has_said_not_with_these: AtomicBool::new(false),
            runs: Runs::default(),
        };
        let connection = connection.map_or_else(|| Connection::open(&compiled.host), Ok);
        let loaded =
            connection.and_then(|mut connection| connection.load(&compiled.package).map(|()| connection));
        match loaded {
            Ok(connection) => compiled.processes.current().keep(connection),
            Err(trouble) if trouble.remedy() == Remedy::StayHere => compiled.refuse(&trouble),
            // The first run tries again.
            Err(_) => {}
        }
        compiled
    }

    /// The runtime that it belongs to.
    pub(crate) const fn ort(&self) -> Ort {
        self.ort
    }

    /// What ran where so far.
    pub(crate) const fn runs(&self) -> &Runs {
        &self.runs
    }

    /// What people call it.
    pub(crate) fn label(&self) -> &str {
        match self.package.model.label.as_str() {
            "" => "a model without a name",
            label => label,
        }
    }

    /// Runs it.
    pub(crate) fn run(&self, context: &Context<'_>) -> Result<(), RunError> {
        let views = context.inputs()?;
        if self.run_on_host(context, &views)? {
            self.runs.on_host.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        self.runs.in_container.fetch_add(1, Ordering::Relaxed);
        let process = self.processes.current();
        let session = process.session(|| local::session(self.ort, &self.package, process.is_child()))?;
        Ok(local::run(session, context)?)
    }

    /// Whether the host has run it.
    fn run_on_host(&self, context: &Context<'_>, views: &[Option<View<'_>>]) -> Result<bool, RunError> {
        if self.is_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let look_at_ms = self.look_at_ms.load(Ordering::Relaxed);
        let was_away = look_at_ms != 0;
        if was_away && now_ms() < look_at_ms {
            return Ok(false);
        }
        let waits = if was_away { PATIENCE_MS.get(..1).unwrap_or_default() } else { &PATIENCE_MS };
        let mut last = None;
        for wait_ms in waits {
            if *wait_ms > 0 {
                sleep_ms(*wait_ms);
            }
            let Some(inputs) = inputs(views) else { return Ok(false) };
            let Err(trouble) = self.attempt(context, inputs) else {
                self.is_back(was_away);
                return Ok(true);
            };
            match trouble.remedy() {
                Remedy::Retry => last = Some(trouble),
                Remedy::RunHere => {
                    if !self.has_said_not_with_these.swap(true, Ordering::Relaxed) {
                        let label = self.label();
                        log::line(format_args!(
                            "the host cannot run {label} with some inputs ({trouble}): such runs are done in the container"
                        ));
                    }
                    return Ok(false);
                }
                Remedy::StayHere => {
                    self.refuse(&trouble);
                    return Ok(false);
                }
                Remedy::GiveUp => return Err(trouble.into()),
            }
        }
        if let Some(trouble) = last {
            self.is_away(&trouble, was_away);
        }
        Ok(false)
    }

    fn attempt(&self, context: &Context<'_>, inputs: Vec<Input<'_>>) -> Result<(), Trouble> {
        let process = self.processes.current();
        let mut connection = match process.take() {
            Some(connection) => connection,
            None => {
                let mut connection = Connection::open(&self.host)?;
                connection.load(&self.package)?;
                connection
            }
        };
        let result = connection.run(inputs, &mut Places { context, package: &self.package });
        match &result {
            Ok(()) => process.keep(connection),
            Err(trouble) if trouble.remedy() == Remedy::RunHere => process.keep(connection),
            Err(_) => process.forget(),
        }
        result
    }

    fn refuse(&self, trouble: &Trouble) {
        if !self.is_refused.swap(true, Ordering::Relaxed) {
            let label = self.label();
            log::line(format_args!(
                "the host cannot run {label} ({trouble}): it runs on the container's own processor"
            ));
        }
        self.processes.current().forget();
    }

    fn is_away(&self, trouble: &Trouble, was_away: bool) {
        let away_ms = if was_away { self.away_ms.load(Ordering::Relaxed).saturating_mul(2) } else { AWAY_MS };
        let away_ms = away_ms.clamp(AWAY_MS, MAX_AWAY_MS);
        self.away_ms.store(away_ms, Ordering::Relaxed);
        let was_away = self.look_at_ms.swap(now_ms().saturating_add(away_ms), Ordering::Relaxed) != 0;
        if !was_away {
            let (label, socket) = (self.label(), &self.host.socket);
            log::line(format_args!(
                "the device's service at {socket} is away ({trouble}): {label} runs on the container's own processor until it is back"
            ));
        }
    }

    fn is_back(&self, was_away: bool) {
        if was_away && self.look_at_ms.swap(0, Ordering::Relaxed) != 0 {
            log::line(format_args!("the device's service is back: {} runs on the host again", self.label()));
        }
    }
}

/// Why a run failed.
#[derive(Debug)]
pub(crate) enum RunError {
    /// The runtime's own error, for the program.
    Ort(Status),
    /// Something else, in words.
    Text(String),
}

impl From<Status> for RunError {
    fn from(status: Status) -> Self {
        Self::Ort(status)
    }
}

impl From<Trouble> for RunError {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Ort(status) => Self::Ort(status),
            other => Self::Text(format!("{other}")),
        }
    }
}

impl From<LocalError> for RunError {
    fn from(error: LocalError) -> Self {
        match error {
            LocalError::Ort(status) => Self::Ort(status),
            LocalError::Kernel(errno) => {
                Self::Text(format!("the host is away, and the model cannot be read: {errno}"))
            }
            LocalError::Output(index) => {
                Self::Text(format!("output {index} has another size than its shape says"))
            }
        }
    }
}

/// A run's inputs; `None` when one of them cannot travel.
fn inputs<'a>(views: &[Option<View<'a>>]) -> Option<Vec<Input<'a>>> {
    views
        .iter()
        .map(|view| {
            let view = view.as_ref()?;
            let dims = view.dims.iter().map(|dim| u64::try_from(*dim).ok()).collect::<Option<Vec<u64>>>()?;
            let tensor = Tensor::new(view.element?, dims).ok()?;
            let is_whole = u64::try_from(view.data.len()).is_ok_and(|bytes| bytes == tensor.bytes());
            is_whole.then_some(Input { tensor, data: view.data })
        })
        .collect()
}

/// The runtime's places for the outputs of a run.
struct Places<'a, 'c> {
    context: &'a Context<'c>,
    package: &'a Package,
}

impl Outputs for Places<'_, '_> {
    fn place(&mut self, index: usize, tensor: &Tensor) -> Result<Option<&mut [u8]>, Placing> {
        let declared: Option<Element> = self.package.model.outputs.get(index).map(|port| port.element);
        // The runtime makes room for the type that the graph declares.
        if declared != Some(tensor.element()) {
            return Err(Placing::Unexpected);
        }
        let dims = tensor.dims().iter().map(|dim| i64::try_from(*dim)).collect::<Result<Vec<i64>, _>>();
        let dims = dims.map_err(|_| Placing::Unexpected)?;
        let place = self.context.output(index, &dims).map_err(Placing::Ort)?;
        match place {
            Some(place) if u64::try_from(place.len()) != Ok(tensor.bytes()) => Err(Placing::Unexpected),
            place => Ok(place),
        }
    }
}
