// SPDX-License-Identifier: MIT OR Apache-2.0
//! Docker's record: `GET /containers/ID/json` on the daemon's unix socket.
//!
//! A CDI request is a `DeviceRequest` of the driver `cdi`. Docker also finds containers by name and by the start of an
//! id, so an answer about another id than the one asked for is no answer. Its pid of the init is read as well:
//! in the hook's request the id is only a word.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use super::http;
use super::{EngineRecord, Record};
use crate::hook_protocol::id_is_plain;

const PROJECT_LABEL: &str = "com.docker.compose.project";

/// One Docker daemon.
#[derive(Debug, Clone)]
pub struct Docker {
    socket: PathBuf,
    uid: u32,
}

impl Docker {
    /// The daemon behind `socket`, which runs the containers of `uid`: 0 unless it is a rootless one.
    #[must_use]
    pub const fn new(socket: PathBuf, uid: u32) -> Self {
        Self { socket, uid }
    }
}

impl EngineRecord for Docker {
    fn name(&self) -> String {
        format!("docker at {}", self.socket.display())
    }

    fn uid(&self) -> u32 {
        self.uid
    }

    fn look_up(&self, container: &str, deadline: Instant) -> Record {
        if !id_is_plain(container) {
            return Record::NoSuchContainer;
        }
        match http::get(&self.socket, &format!("/containers/{container}/json"), deadline) {
            Ok(bytes) => read(&self.socket, &bytes, container),
            Err(error) => Record::Unavailable { reason: error.to_string() },
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    id: String,
    state: State,
    host_config: HostConfig,
    #[serde(default)]
    config: Option<Config>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct State {
    pid: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostConfig {
    #[serde(default)]
    device_requests: Option<Vec<DeviceRequest>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DeviceRequest {
    #[serde(default)]
    driver: String,
    #[serde(default, rename = "DeviceIDs")]
    device_ids: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Config {
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
}

fn read(socket: &Path, bytes: &[u8], asked_for: &str) -> Record {
    let response = match http::parse(socket, bytes) {
        Ok(response) => response,
        Err(error) => return Record::Unavailable { reason: error.to_string() },
    };
    match response.status {
        200 => {}
        404 => return Record::NoSuchContainer,
        status => return Record::Unavailable { reason: format!("the daemon answered with status {status}") },
    }
    let container: Container = match serde_json::from_slice(response.body) {
        Ok(container) => container,
        Err(error) => {
            return Record::Unavailable {
                reason: format!("the daemon's answer has an unknown form: {error}"),
            };
        }
    };
    if container.id != asked_for {
        return Record::NoSuchContainer;
    }
    let devices = container
        .host_config
        .device_requests
        .unwrap_or_default()
        .into_iter()
        .filter(|request| request.driver == "cdi")
        .flat_map(|request| request.device_ids.unwrap_or_default())
        .collect();
    let project = container
        .config
        .and_then(|config| config.labels?.remove(PROJECT_LABEL))
        .filter(|project| !project.is_empty() && project.len() <= 255);
    Record::Found { devices, project, init_pid: Some(container.state.pid) }
}

/// Takes any bytes for an answer, and for the body of a good one.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(input: &[u8]) {
    const ID: &str = "0f3c";
    const BODY: &[u8] = br#"{"Id":"0f3c","State":{"Pid":7},"HostConfig":{"DeviceRequests":[{"Driver":"cdi",
        "DeviceIDs":["lighter.sh/metal=all"]}]},"Config":{"Labels":{"com.docker.compose.project":"shop"}}}"#;
    const WHOLE: &[u8] = b"HTTP/1.0 200 OK\r\nContent-Length: 66\r\nServer: x\r\n\r\n\
        {\"Id\":\"0f3c\",\"State\":{\"Pid\":7},\"HostConfig\":{\"DeviceRequests\":[]}}";
    let bytes = crate::fuzzing::shaped(input, &[BODY, WHOLE]);
    let mut whole = format!("HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", bytes.len()).into_bytes();
    whole.extend(&bytes);
    for answer in [&bytes, &whole] {
        if let Record::Found { project: Some(project), .. } = read(Path::new("/s"), answer, ID) {
            assert!(!project.is_empty() && project.len() <= 255, "a project of {} bytes", project.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answer(status: &str, body: &str) -> Record {
        let text = format!("HTTP/1.0 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        read(Path::new("/s"), text.as_bytes(), "0f3c")
    }

    #[test]
    fn cdi_requests_and_the_compose_project_are_read() {
        let body = r#"{"Id":"0f3c","State":{"Pid":7},"HostConfig":{"DeviceRequests":[
            {"Driver":"cdi","Count":0,"DeviceIDs":["lighter.sh/metal=all","lighter.sh/gpu=all"],"Capabilities":null},
            {"Driver":"nvidia","DeviceIDs":["lighter.sh/ane=all"]}]},
            "Config":{"Labels":{"com.docker.compose.project":"shop"}}}"#;
        assert_eq!(
            answer("200 OK", body),
            Record::Found {
                devices: vec!["lighter.sh/metal=all".into(), "lighter.sh/gpu=all".into()],
                project: Some("shop".into()),
                init_pid: Some(7)
            }
        );
    }

    #[test]
    fn a_container_without_devices_has_none_and_another_id_is_no_answer() {
        let body = r#"{"Id":"0f3c","State":{"Pid":0},"HostConfig":{"DeviceRequests":null},"Config":{"Labels":null}}"#;
        let none = Record::Found { devices: vec![], project: None, init_pid: Some(0) };
        assert_eq!(answer("200 OK", body), none);
        assert_eq!(answer("200 OK", &body.replace("0f3c", "0f3c9")), Record::NoSuchContainer);
        assert_eq!(answer("404 Not Found", "{}"), Record::NoSuchContainer);
    }

    #[test]
    fn an_answer_that_cannot_be_used_is_not_taken_for_an_empty_one() {
        for (status, body) in [("500 Oops", "{}"), ("200 OK", "{}"), ("200 OK", "[]"), ("200 OK", "")] {
            assert!(matches!(answer(status, body), Record::Unavailable { .. }), "{status} {body}");
        }
    }

    #[test]
    fn an_id_that_would_change_the_request_is_never_sent() {
        let docker = Docker::new("/nonexistent".into(), 0);
        assert_eq!(docker.look_up("../images/x", Instant::now()), Record::NoSuchContainer);
    }

    proptest! {
        #[test]
        fn no_answer_panics(body in ".{0,200}") {
            let _ = answer("200 OK", &body);
        }
    }
}
