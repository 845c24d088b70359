// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine recorded about a container: the devices that its user asked for.
//!
//! The agent asks at a grant's first stream, never in the hook: an engine holds the container's lock while it starts.
//! No answer, or an answer without the device, means that the stream is refused.

mod docker;
mod http;

use std::time::Instant;

pub use docker::Docker;

use crate::device::DeviceName;

/// One engine on this host.
pub trait EngineRecord: Send + Sync {
    /// What a user calls it: `docker at /run/docker.sock`.
    fn name(&self) -> String;

    /// The uid whose containers it runs: 0 for the system's engine, a user's for a rootless one. Only grants that were
    /// asked for by that uid's hooks are looked up in it, so that no user can point at another's container.
    fn uid(&self) -> u32;

    /// Looks one container up, by its full id. Must come back by the deadline, whatever the engine does.
    fn look_up(&self, container: &str, deadline: Instant) -> Record;
}

/// An engine's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// It runs this container.
    Found {
        /// Full CDI names that were asked for.
        devices: Vec<String>,
        /// The Compose project, where there is one.
        project: Option<String>,
        /// The init of the container by the engine, 0 when it does not run; `None` from an engine that does not tell.
        init_pid: Option<u32>,
    },
    /// It knows no such container.
    NoSuchContainer,
    /// It gave no answer that can be used.
    Unavailable {
        /// Why.
        reason: String,
    },
}

/// What the answers of all engines mean for one grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// An engine recorded the request.
    Confirmed { project: Option<String> },
    /// None did.
    Denied { reason: String },
}

/// What the engines are asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question<'a> {
    pub(crate) uid: u32,
    pub(crate) container: &'a str,
    pub(crate) init_pid: u32,
    pub(crate) device: &'a DeviceName,
    pub(crate) deadline: Instant,
}

/// Asks the engines of `uid` in turn; the first that knows the container decides.
///
/// The id came with the hook's request. That the engine's container has the same init makes sure that a caller did not
/// name somebody else's.
pub(crate) fn ask(engines: &[Box<dyn EngineRecord>], question: Question<'_>) -> Verdict {
    let Question { uid, container, init_pid: own_init, device, deadline } = question;
    let mut silent = Vec::new();
    let mut asked = Vec::new();
    for engine in engines.iter().filter(|engine| engine.uid() == uid) {
        match engine.look_up(container, deadline) {
            Record::Found { init_pid: Some(other), .. } if other != own_init => {
                let name = engine.name();
                let reason =
                    format!("{name} says that the container's init is process {other}, not {own_init}");
                return Verdict::Denied { reason };
            }
            Record::Found { devices, project, .. } => {
                let device = device.to_string();
                if devices.contains(&device) {
                    return Verdict::Confirmed { project };
                }
                let has = if devices.is_empty() { "no CDI device".to_owned() } else { devices.join(", ") };
                let reason = format!("{} recorded {has} for this container, not {device}", engine.name());
                return Verdict::Denied { reason };
            }
            Record::NoSuchContainer => asked.push(engine.name()),
            Record::Unavailable { reason } => silent.push(format!("{}: {reason}", engine.name())),
        }
    }
    let reason = if !silent.is_empty() {
        format!("no answer from {}", silent.join("; "))
    } else if asked.is_empty() {
        format!("no engine of uid {uid} is configured whose record could confirm the request")
    } else {
        format!("{} knows no such container", asked.join(", "))
    };
    Verdict::Denied { reason }
}

/// Takes any bytes for an engine's answer.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(input: &[u8]) {
    docker::fuzz(input);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Fixed(u32, Record);

    impl EngineRecord for Fixed {
        fn name(&self) -> String {
            format!("engine {}", self.0)
        }
        fn uid(&self) -> u32 {
            self.0
        }
        fn look_up(&self, _: &str, _: Instant) -> Record {
            self.1.clone()
        }
    }

    fn found(device: &str) -> Record {
        Record::Found { devices: vec![device.into()], project: Some("p".into()), init_pid: Some(7) }
    }

    fn verdict(engines: Vec<Fixed>, uid: u32) -> Verdict {
        let engines: Vec<Box<dyn EngineRecord>> =
            engines.into_iter().map(|engine| Box::new(engine) as Box<dyn EngineRecord>).collect();
        let device = "lighter.sh/metal=all".parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(1);
        ask(&engines, Question { uid, container: "c", init_pid: 7, device: &device, deadline })
    }

    #[test]
    fn the_engine_that_knows_the_container_decides() {
        let silent = || Fixed(0, Record::Unavailable { reason: "down".into() });
        let other = || Fixed(0, Record::NoSuchContainer);
        let yes = || Fixed(0, found("lighter.sh/metal=all"));
        let another = || Fixed(0, found("lighter.sh/gpu=all"));
        let confirmed = Verdict::Confirmed { project: Some("p".into()) };
        assert_eq!(verdict(vec![silent(), other(), yes()], 0), confirmed);
        for (engines, says) in [
            (vec![another(), yes()], "recorded lighter.sh/gpu=all"),
            (vec![silent()], "no answer from engine 0: down"),
            (vec![other(), silent()], "no answer"),
            (vec![other()], "knows no such container"),
            (vec![], "no engine of uid 0"),
        ] {
            let Verdict::Denied { reason } = verdict(engines, 0) else { panic!("allowed: {says}") };
            assert!(reason.contains(says), "{reason}");
        }
    }

    #[test]
    fn the_id_of_another_container_confirms_nothing() {
        for (pid, confirmed) in [(Some(7), true), (None, true), (Some(8), false), (Some(0), false)] {
            let devices = vec!["lighter.sh/metal=all".into()];
            let verdict = verdict(vec![Fixed(0, Record::Found { devices, project: None, init_pid: pid })], 0);
            assert_eq!(matches!(verdict, Verdict::Confirmed { .. }), confirmed, "{pid:?}: {verdict:?}");
        }
    }

    #[test]
    fn a_users_container_is_not_looked_up_in_the_systems_engine() {
        let verdict = verdict(vec![Fixed(0, found("lighter.sh/metal=all"))], 1000);
        assert!(matches!(verdict, Verdict::Denied { reason } if reason.contains("uid 1000")));
    }
}
