// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `configure` sets up once, and what every function of the module works with.

use std::path::Path;
use std::sync::OnceLock;

use crate::guarded::Guarded;
use crate::kernel::Kernel;
use crate::key::{Known, Scratch};
use crate::numbers::Number;
use crate::python::{Gil, Kept, Kind, Object, Raised};
use crate::shims::Shims;
use crate::socket::{Batch, Written};
use crate::stream::{Step, Stream, watch_forks};
use crate::tensors::Maker;
use crate::views::TorchViews;

/// The stream, which exists before `configure` and after the interpreter's end.
pub(crate) static STREAM: Stream = Stream::new();
static CORE: OnceLock<Core> = OnceLock::new();

/// What the hot path needs of Python and torch.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) shims: Shims,
    pub(crate) known: Known,
    pub(crate) maker: Maker,
    pub(crate) torch_views: TorchViews,
    pub(crate) miss: Kept,
    /// Called after each operator where the user wants errors at once.
    pub(crate) sync_call: Option<Kept>,
    no_socket: Kept,
    /// Memory of the last call, for the next.
    pub(crate) scratch: Guarded<Memory>,
    pub(crate) kernels: Guarded<Vec<&'static Kernel>>,
}

/// Buffers that a call fills.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) written: Scratch,
    pub(crate) numbers: Vec<Number>,
}

/// What `configure` is given.
#[derive(Debug)]
pub(crate) struct Settings<'a> {
    pub(crate) torch_lib_dir: Object<'a>,
    pub(crate) tensor: Object<'a>,
    pub(crate) parameter: Object<'a>,
    pub(crate) miss: Object<'a>,
    pub(crate) sync_call: Object<'a>,
    pub(crate) no_socket: Object<'a>,
    pub(crate) flush_bytes: i64,
    /// Which of `tensors.rs`'s ways to make tensors, for tests; None for the best.
    pub(crate) maker: Option<&'a [u8]>,
}

/// The configured core; an error is raised where there is none.
pub(crate) fn core(gil: Gil<'_>) -> Result<&'static Core, Raised> {
    CORE.get().ok_or_else(|| gil.raise(Kind::Runtime, "lighter_mps._core: configure() comes first"))
}

impl Core {
    /// Sets the core up; refused the second time.
    pub(crate) fn configure(gil: Gil<'_>, settings: &Settings<'_>) -> Result<(), Raised> {
        let folder = String::from_utf8_lossy(settings.torch_lib_dir.as_text()?).into_owned();
        let shims = Shims::load(Path::new(&folder))
            .map_err(|error| gil.raise(Kind::Runtime, &format!("lighter_mps._core: {error}")))?;
        let flush_bytes = usize::try_from(settings.flush_bytes)
            .map_err(|_| gil.raise(Kind::Value, "lighter_mps._core: flush_bytes is negative"))?;
        let known = Known::new(gil, settings.tensor.keep(), settings.parameter.keep())?;
        let maker = Maker::choose(gil, &known, &shims, settings.maker)?;
        let core = Self {
            maker,
            shims,
            torch_views: TorchViews::new(gil)?,
            known,
            miss: settings.miss.keep(),
            sync_call: (!settings.sync_call.is_none()).then(|| settings.sync_call.keep()),
            no_socket: settings.no_socket.keep(),
            scratch: Guarded::default(),
            kernels: Guarded::default(),
        };
        if CORE.set(core).is_err() {
            return Err(gil.raise(Kind::Runtime, "lighter_mps._core: configure() was called before"));
        }
        STREAM.set_flush_bytes(flush_bytes);
        watch_forks();
        Ok(())
    }

    /// Writes everything that is on the stream now.
    pub(crate) fn flush(&self, gil: Gil<'_>) -> Result<(), Raised> {
        let goal = STREAM.goal();
        loop {
            match STREAM.step(goal) {
                Step::Done => return Ok(()),
                step => self.take_step(gil, step)?,
            }
        }
    }

    /// Writes what is on the stream now unless another thread does.
    pub(crate) fn flush_when_due(&self, gil: Gil<'_>) -> Result<(), Raised> {
        match STREAM.step_when_due() {
            Step::Done => Ok(()),
            step => self.take_step(gil, step),
        }
    }

    fn take_step(&self, gil: Gil<'_>, step: Step) -> Result<(), Raised> {
        match step {
            Step::Done => Ok(()),
            Step::Wait => {
                gil.released(|| STREAM.wait());
                Ok(())
            }
            Step::NoSocket(None) => self.ask_for_socket(gil, 0),
            Step::NoSocket(Some(error)) => self.lost(gil, error),
            Step::Write(batch) => self.write(gil, batch),
        }
    }

    fn write(&self, gil: Gil<'_>, mut batch: Batch) -> Result<(), Raised> {
        let mut written = batch.write(false);
        loop {
            match written {
                Written::Full => {
                    let (back, how) = gil.released(move || {
                        let how = batch.write(true);
                        (batch, how)
                    });
                    batch = back;
                    written = how;
                }
                Written::Interrupted => {
                    if let Err(raised) = gil.check_signals() {
                        STREAM.finish(batch);
                        return Err(raised);
                    }
                    written = batch.write(false);
                }
                Written::All => {
                    STREAM.finish(batch);
                    return Ok(());
                }
                Written::Failed(error) => {
                    STREAM.finish(batch);
                    return self.lost(gil, error);
                }
            }
        }
    }

    fn lost(&self, gil: Gil<'_>, error: rustix::io::Errno) -> Result<(), Raised> {
        self.ask_for_socket(gil, error.raw_os_error())?;
        let text = format!("lighter_mps: writing to the host failed: {error}");
        Err(gil.raise(Kind::Connection, &text))
    }

    /// Lets Python connect, or raise what it knows of the loss.
    fn ask_for_socket(&self, gil: Gil<'_>, error: i32) -> Result<(), Raised> {
        let number = gil.integer(u64::try_from(error).unwrap_or(0))?;
        self.no_socket.object(gil).call(&[number.object()])?;
        if error == 0 && !STREAM.has_socket() {
            return Err(gil.raise(Kind::Connection, "lighter_mps: there is no connection to the host"));
        }
        Ok(())
    }
}
