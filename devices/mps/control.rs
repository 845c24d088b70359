// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the mps service and one of its workers say to each other.
//!
//! One `SOCK_SEQPACKET` pair a worker ([`lighter_wire::send`] and [`lighter_wire::recv`]); the worker, a Python
//! (`python/lighter_mps_host`), finds its end as descriptor 0 and ends when it closes. The service trusts nothing that a
//! worker says: a worker has torch and a container's bytes in it.

use serde::{Deserialize, Serialize};

/// Version of these messages.
pub const WORKER_VERSION: u32 = 1;

/// Service to worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToWorker {
    /// First message: which device, and how far to go. Answered by [`FromWorker::Ready`] or [`FromWorker::Failed`].
    Configure(WorkerConfig),
    /// A client's socket; one descriptor. A worker serves one stream and ends with it.
    Stream {
        /// Number of the stream, for its end.
        stream: u64,
    },
    /// Say how things are; answered by [`FromWorker::Counters`] with the same number.
    Report {
        /// Chosen by the service.
        seq: u64,
    },
}

/// What a worker needs to know before it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// [`WORKER_VERSION`].
    pub version: u32,
    /// torch's name of the device that computes.
    pub device: String,
    /// Threads of torch.
    pub threads: u16,
    /// Most bytes of tensors.
    pub max_bytes: u64,
    /// Most storages.
    pub max_storages: u32,
    /// Most different calls that a client may define.
    pub max_signatures: u32,
}

/// Worker to service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromWorker {
    /// torch is loaded and its device is open.
    Ready(Ready),
    /// That could not be done; the worker ends.
    Failed {
        /// Why, for a person.
        reason: String,
    },
    /// The stream ended; the worker ends.
    Ended {
        /// Its number.
        stream: u64,
        /// Why, when not by the client's own orderly end.
        reason: Option<String>,
    },
    /// How things are.
    Counters(Counters),
}

/// What a worker says of itself when it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    /// The worker's version of these messages.
    pub version: u32,
    /// torch's version.
    pub torch: String,
    /// Python's version.
    pub python: String,
    /// The device.
    pub device: String,
}

/// Counters of one worker, since it started. What this service does not know is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Number of the question.
    pub seq: u64,
    /// Operators run.
    #[serde(default)]
    pub calls: u64,
    /// Bytes from the client.
    #[serde(default)]
    pub bytes_in: u64,
    /// Bytes to the client.
    #[serde(default)]
    pub bytes_out: u64,
    /// Bytes of tensors held.
    #[serde(default)]
    pub held_bytes: u64,
    /// Storages held.
    #[serde(default)]
    pub storages: u64,
    /// Calls that failed.
    #[serde(default)]
    pub errors: u64,
    /// Microseconds that the device worked.
    #[serde(default)]
    pub engine_us: u64,
    /// The last failure, in words.
    #[serde(default)]
    pub last_error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The other side is written in another language: the form is fixed here.
    #[test]
    fn messages_have_the_form_that_the_worker_knows() {
        let config = WorkerConfig {
            version: 1,
            device: "cpu".to_owned(),
            threads: 2,
            max_bytes: 3,
            max_storages: 4,
            max_signatures: 5,
        };
        for (message, text) in [
            (
                ToWorker::Configure(config),
                r#"{"configure":{"version":1,"device":"cpu","threads":2,"max_bytes":3,"max_storages":4,"max_signatures":5}}"#,
            ),
            (ToWorker::Stream { stream: 7 }, r#"{"stream":{"stream":7}}"#),
            (ToWorker::Report { seq: 8 }, r#"{"report":{"seq":8}}"#),
        ] {
            assert_eq!(serde_json::to_string(&message).unwrap(), text);
        }
        let ready: FromWorker = serde_json::from_str(
            r#"{"ready":{"version":1,"torch":"2.15.0+cu132","python":"3.11.7","device":"cpu"}}"#,
        )
        .unwrap();
        assert!(matches!(ready, FromWorker::Ready(Ready { version: 1, .. })));
        let ended = serde_json::from_str(r#"{"ended":{"stream":7,"reason":null}}"#).unwrap();
        assert_eq!(FromWorker::Ended { stream: 7, reason: None }, ended);
        let counters =
            serde_json::from_str(r#"{"counters":{"seq":8,"calls":1,"new":[],"last_error":null}}"#).unwrap();
        assert_eq!(FromWorker::Counters(Counters { seq: 8, calls: 1, ..Counters::default() }), counters);
        for bad in [
            r#"{"counters":{"seq":-1}}"#,
            r#"{"counters":{"calls":1}}"#,
            r#"{"ended":{"stream":7,"reason":1}}"#,
            r#"{"other":{}}"#,
            r#"["ready"]"#,
        ] {
            assert!(serde_json::from_str::<FromWorker>(bad).is_err(), "{bad}");
        }
    }
}
