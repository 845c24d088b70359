// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sets one stream up, on a thread of its own: greeting, which model, its bytes. Then the warden has it.
//!
//! ```text
//! Hello ─► HelloOk ─► Model ─► Have ───────────────► to the warden, which says Loaded
//!                 │        └─► Want ─► Sending + bytes ─┘
//!                 └─► nothing: the container has only asked
//! ```
//! Nothing that comes is believed: seals, lengths and the hash are looked at here. A container that stops in the middle
//! is let go after a time.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use lighter_frames::{HelloOk, MAX_RUN_BYTES, Message, Model, OrtVersion, Refusal, Refused, Transport};

use super::super::config::Units;
use super::engines::Host;
use super::frames_io::{FrameIoError, Frames};
use super::models::{ModelError, ModelFile, Models, Room};
use super::shared::Shared;
use super::warden::Own;
use crate::service::wardens::{Ask, Mailbox};
use crate::text::with_causes;

/// Most streams of one container that are being set up at one time.
pub(super) const MOST_AT_ONCE: usize = 64;
/// How long a warden may take to let go of models.
const ROOM_LIMIT: Duration = Duration::from_secs(5);

/// Why a stream is not set up.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    /// The container's side of it.
    #[error(transparent)]
    Frames(#[from] FrameIoError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Another message than the one that is due.
    #[error("the container sent {got} where {due} is due")]
    Order {
        /// What came.
        got: String,
        /// What should have come.
        due: &'static str,
    },
    /// Units that are none.
    #[error(transparent)]
    Units(#[from] super::super::config::UnknownUnits),
    /// The host cannot serve.
    #[error("{reason}; {remedy}")]
    NoEngine {
        /// Why.
        reason: String,
        /// What the host's user can do.
        remedy: String,
    },
}

impl SetupError {
    /// What the container is told; nothing when it is not there any more.
    fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Frames(FrameIoError::Ended | FrameIoError::Socket(_)) => None,
            Self::Frames(_) | Self::Order { .. } | Self::Units(_) => Some(Refusal::Protocol),
            Self::Model(ModelError::Seals { .. } | ModelError::Length { .. } | ModelError::Hash) => {
                Some(Refusal::Protocol)
            }
            Self::Model(ModelError::Read(_)) => None,
            Self::Model(ModelError::Count { .. } | ModelError::Memory { .. }) | Self::NoEngine { .. } => {
                Some(Refusal::Busy)
            }
            Self::Model(ModelError::Bytes { bytes, limit }) => {
                Some(if bytes > limit { Refusal::Model } else { Refusal::Busy })
            }
        }
    }
}

/// What a set-up ends with.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) stream: u64,
    pub(super) socket: OwnedFd,
    pub(super) model: Model,
    pub(super) file: Arc<ModelFile>,
    pub(super) units: Units,
}

/// One container's part in set-ups.
#[derive(Debug, Clone)]
pub(super) struct Setups {
    pub(super) shared: Arc<Shared>,
    pub(super) models: Arc<Models>,
    pub(super) ending: Arc<AtomicBool>,
    pub(super) busy: Arc<AtomicUsize>,
    pub(super) mailbox: Mailbox<Own>,
}

/// Counts a set-up for as long as it lasts.
pub(super) struct Busy(Arc<AtomicUsize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Setups {
    /// A place among those at one time.
    pub(super) fn begin(&self) -> Option<Busy> {
        if self.busy.fetch_add(1, Ordering::Relaxed) < MOST_AT_ONCE {
            return Some(Busy(Arc::clone(&self.busy)));
        }
        self.busy.fetch_sub(1, Ordering::Relaxed);
        None
    }

    /// The whole set-up; `None` when the container has only asked whether somebody serves. What is refused is told to
    /// the container.
    pub(super) fn run(&self, stream: u64, socket: OwnedFd) -> Result<Option<Ready>, String> {
        match self.set_up(&socket) {
            Ok(done) => Ok(done.map(|(model, file, units)| Ready { stream, socket, model, file, units })),
            Err(error) => {
                let text = with_causes(&error);
                if let Some(refusal) = error.refusal() {
                    refuse(&socket, refusal, &text);
                }
                Err(text)
            }
        }
    }

    fn set_up(&self, socket: &OwnedFd) -> Result<Option<(Model, Arc<ModelFile>, Units)>, SetupError> {
        let config = &self.shared.config;
        let mut frames = Frames::new(socket, config.setup_limit());
        let Message::Hello(hello) = expect(frames.receive_plain()?, "Hello")? else {
            return Err(order("another message", "Hello"));
        };
        let units = if hello.units.is_empty() { Units::Auto } else { hello.units.parse()? };
        let host = self.engines()?;
        frames.send(&Message::HelloOk(HelloOk {
            ort: host.engines.get(host.cpu).and_then(|engine| OrtVersion::parse(&engine.version)),
            transport: hello.transport,
            max_model_bytes: self.shared.max_model_bytes,
            max_run_bytes: self.shared.max_run_bytes.min(MAX_RUN_BYTES),
        }))?;
        let message = match frames.receive_plain() {
            // A session greets before it knows whether it has a model for the host, or long before it has written one.
            Err(FrameIoError::Ended | FrameIoError::Late { .. }) => return Ok(None),
            message => message?,
        };
        let Message::Model(model) = expect(message, "Model")? else {
            return Err(order("another message", "Model"));
        };
        let bytes = model.file_bytes();
        if let Some(file) = self.models.find(&model.hash, bytes) {
            frames.send(&Message::Have)?;
            return Ok(Some((model, file, units)));
        }
        let room = self.room(bytes)?;
        frames.send(&Message::Want)?;
        let (message, descriptor) = frames.receive()?;
        expect(message, "Sending")?;
        let is_ending = || self.ending.load(Ordering::Relaxed);
        let file = match (hello.transport, descriptor) {
            (Transport::SharedMemory, Some(file)) => {
                self.models.take_file(room, file, model.hash, &is_ending)?
            }
            (Transport::Stream, None) => self.models.take_stream(room, &mut frames, model.hash)?,
            (_, descriptor) => {
                let count = usize::from(descriptor.is_some());
                return Err(FrameIoError::Descriptors { count, expected: 1 - count }.into());
            }
        };
        Ok(Some((model, file, units)))
    }

    /// Room for a model; the warden lets go of what is not used when there is none.
    fn room(&self, bytes: u64) -> Result<Room<'_>, ModelError> {
        match self.models.room(bytes) {
            Err(ModelError::Bytes { limit, .. }) if bytes > limit => {}
            Ok(room) => return Ok(room),
            Err(_) => {
                let (done, made) = channel();
                self.mailbox.send(Ask::Own(Own::MakeRoom(done)));
                // Nobody sends anything: the channel closes when the warden is done.
                let _ = made.recv_timeout(ROOM_LIMIT);
            }
        }
        self.models.room(bytes)
    }

    fn engines(&self) -> Result<Arc<Host>, SetupError> {
        self.shared
            .engines
            .get(&self.shared.program, &self.shared.config)
            .map_err(|missing| SetupError::NoEngine { reason: missing.reason, remedy: missing.remedy })
    }
}

fn expect(message: Message, due: &'static str) -> Result<Message, SetupError> {
    let got = format!("{:?}", message.kind());
    if got == due { Ok(message) } else { Err(order(&got, due)) }
}

fn order(got: &str, due: &'static str) -> SetupError {
    SetupError::Order { got: got.to_owned(), due }
}

/// Tells a container why not; it is gone as soon as the socket is dropped.
pub(super) fn refuse(socket: &OwnedFd, refusal: Refusal, text: &str) {
    let message = Message::Refused(Refused { refusal, text: text.to_owned() });
    // The container may be gone, or may not read: then it does not learn why.
    let _ = Frames::new(socket, Duration::ZERO).send(&message);
}
