// SPDX-License-Identifier: MIT OR Apache-2.0
//! All messages in one type, to and from frames.

use alloc::vec::Vec;

use crate::read::{Reader, widen};
use crate::write::Writer;
use crate::{
    Answer, Failed, FrameError, Grow, HEADER_BYTES, Header, Hello, HelloOk, Kind, Loaded, Model, Refused,
    Ring, Run,
};

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// See [`Hello`].
    Hello(Hello),
    /// See [`HelloOk`].
    HelloOk(HelloOk),
    /// See [`Model`].
    Model(Model),
    /// See [`Kind::Have`].
    Have,
    /// See [`Kind::Want`].
    Want,
    /// See [`Kind::Sending`].
    Sending,
    /// See [`Loaded`].
    Loaded(Loaded),
    /// See [`Refused`].
    Refused(Refused),
    /// See [`Ring`].
    Ring(Ring),
    /// See [`Run`].
    Run(Run),
    /// See [`Answer`].
    Answer(Answer),
    /// See [`Failed`].
    Failed(Failed),
    /// See [`Grow`].
    Grow(Grow),
    /// See [`Kind::Bell`].
    Bell,
}

impl Message {
    /// What it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::HelloOk(_) => Kind::HelloOk,
            Self::Model(_) => Kind::Model,
            Self::Have => Kind::Have,
            Self::Want => Kind::Want,
            Self::Sending => Kind::Sending,
            Self::Loaded(_) => Kind::Loaded,
            Self::Refused(_) => Kind::Refused,
            Self::Ring(_) => Kind::Ring,
            Self::Run(_) => Kind::Run,
            Self::Answer(_) => Kind::Answer,
            Self::Failed(_) => Kind::Failed,
            Self::Grow(_) => Kind::Grow,
            Self::Bell => Kind::Bell,
        }
    }

    /// The whole frame, header included.
    ///
    /// # Errors
    /// When a field is over its cap.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let mut to = Writer::new(self.kind());
        match self {
            Self::Hello(hello) => hello.write(&mut to)?,
            Self::HelloOk(ok) => ok.write(&mut to),
            Self::Model(model) => model.write(&mut to)?,
            Self::Loaded(loaded) => to.bytes(&loaded.hash),
            Self::Refused(refused) => refused.write(&mut to),
            Self::Ring(ring) => ring.write(&mut to)?,
            Self::Run(run) => run.write(&mut to)?,
            Self::Answer(answer) => answer.write(&mut to)?,
            Self::Failed(failed) => failed.write(&mut to),
            Self::Grow(grow) => grow.write(&mut to)?,
            Self::Have | Self::Want | Self::Sending | Self::Bell => {}
        }
        to.finish()
    }

    /// Reads the body that follows a header.
    ///
    /// # Errors
    /// When the body is shorter or longer than its message, or a field is over its cap.
    pub fn decode(header: Header, body: &[u8]) -> Result<Self, FrameError> {
        let mut from = Reader::new(body);
        let body_bytes = u64::from(header.body_bytes);
        if widen(body.len()) != body_bytes {
            return Err(FrameError::Short { field: "body", needed: body_bytes, left: widen(body.len()) });
        }
        let message = match header.kind {
            Kind::Hello => Self::Hello(Hello::read(&mut from)?),
            Kind::HelloOk => Self::HelloOk(HelloOk::read(&mut from)?),
            Kind::Model => Self::Model(Model::read(&mut from)?),
            Kind::Have => Self::Have,
            Kind::Want => Self::Want,
            Kind::Sending => Self::Sending,
            Kind::Loaded => Self::Loaded(Loaded { hash: from.hash("hash")? }),
            Kind::Refused => Self::Refused(Refused::read(&mut from)?),
            Kind::Ring => Self::Ring(Ring::read(&mut from)?),
            Kind::Run => Self::Run(Run::read(&mut from)?),
            Kind::Answer => Self::Answer(Answer::read(&mut from)?),
            Kind::Failed => Self::Failed(Failed::read(&mut from)?),
            Kind::Grow => Self::Grow(Grow::read(&mut from)?),
            Kind::Bell => Self::Bell,
        };
        if from.left() > 0 {
            return Err(FrameError::Trailing { kind: header.kind, bytes: widen(from.left()) });
        }
        Ok(message)
    }

    /// Reads a frame from the start of bytes that may go on after it, such as a ring's head area once it is copied.
    ///
    /// # Errors
    /// As [`Header::decode`] and [`Self::decode`], and when the bytes end within the frame.
    pub fn decode_frame(bytes: &[u8]) -> Result<Self, FrameError> {
        let left = widen(bytes.len());
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(FrameError::Short { field: "header", needed: widen(HEADER_BYTES), left });
        };
        let header = Header::decode(header)?;
        let body = usize::try_from(header.body_bytes).ok().and_then(|bytes| rest.get(..bytes));
        let short =
            FrameError::Short { field: "body", needed: header.body_bytes.into(), left: widen(rest.len()) };
        Self::decode(header, body.ok_or(short)?)
    }
}
