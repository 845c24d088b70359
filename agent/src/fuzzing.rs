// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every parser of bytes from outside, an entry each, for the targets of `fuzz/`; no part of what is shipped.
//!
//! An entry takes any bytes. The first one says what is made of the others: the input itself, or a good one of a list
//! with the others written over it here and there, so that a fuzzer gets behind the first few checks.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cgroup::{CgroupMounts, Cgroups, candidates};
use crate::device::DeviceName;
use crate::hook_protocol::{FromAgent, OciState, ToAgent, id_is_plain};
use crate::{bundle, proc, record, sockdiag, state};

const MESSAGES: [&str; 5] = [
    r#"{"grant":{"version":2,"id":"0f3c","bundle":"/run/b/0f3c","device":"lighter.sh/metal=all"}}"#,
    r#"{"open_failed":{"port":50052,"errno":98}}"#,
    r#"{"release":{"version":2,"id":"0f3c","device":"lighter.sh/ane=all"}}"#,
    r#"{"open":{"ports":[50052,50053]}}"#,
    r#"{"refused":{"cause":"no","remedy":"yes"}}"#,
];
const DOCUMENTS: [&str; 3] = [
    r#"{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":42,"bundle":"/run/b/c1","annotations":{"a":"b"}}"#,
    r#"{"hooks":{"createRuntime":[{"path":"/h","args":["lighter-hook","grant","lighter.sh/metal=all"],"timeout":10}]}}"#,
    r#"{"version":1,"boot":"b","grant":"metal-1","container":"c","device":"lighter.sh/metal=all","caller_uid":0,"init":{"pid":7,
    "start_time":8,"net_ns":{"dev":4,"ino":1},"pid_ns":{"dev":4,"ino":2},"mount_ns":{"dev":4,"ino":3},"own_mounts":true,
    "cgroup":{"hierarchy":"","path":"/d/x"}},"record":{"confirmed":{"project":"p"}}}"#,
];
const TEXTS: [&str; 4] = [
    "9:name=systemd:/docker/0f3c\n4:memory:/outer/docker/0f3c\n1:cpu,cpuacct:/\n0::/system.slice/x.scope\n",
    "30 1 0:26 / /sys/fs/cgroup/memory rw shared:3 - cgroup cgroup rw,memory\n32 1 0:28 / /sys/fs/cgroup rw - cgroup2 c rw\n",
    "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 9 9",
    "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nPid:\t4242\nNSpid:\t4242\n",
];

/// The input, or one of the samples with the input written over it: two bytes say where, one says what.
pub(crate) fn shaped(input: &[u8], samples: &[&[u8]]) -> Vec<u8> {
    let Some((choice, rest)) = input.split_first() else { return Vec::new() };
    let Some(sample) = samples.get(usize::from(*choice).wrapping_sub(1)) else { return rest.to_vec() };
    let mut bytes = sample.to_vec();
    for edit in rest.as_chunks::<3>().0 {
        let [high, low, value] = *edit;
        let at = usize::from(u16::from_be_bytes([high, low]));
        match bytes.get_mut(at) {
            Some(byte) => *byte = value,
            // Behind the end: what is there is cut, or grows.
            None if value == 0 => drop(bytes.pop()),
            None => bytes.push(value),
        }
    }
    bytes
}

fn samples<'a>(texts: &'a [&'a str]) -> Vec<&'a [u8]> {
    texts.iter().map(|text| text.as_bytes()).collect()
}

/// What the kernel answers about sockets.
pub fn sock_diag(input: &[u8]) {
    sockdiag::fuzz(input);
}

/// What an engine answers about a container.
pub fn engine_answer(input: &[u8]) {
    record::fuzz(input);
}

/// What a hook says to the agent, and the agent to a hook.
pub fn hook_message(input: &[u8]) {
    let bytes = shaped(input, &samples(&MESSAGES));
    comes_back::<ToAgent>(&bytes);
    comes_back::<FromAgent>(&bytes);
}

fn comes_back<T: DeserializeOwned + Serialize + PartialEq>(bytes: &[u8]) {
    let Ok(message) = serde_json::from_slice::<T>(bytes) else { return };
    // A path that is no text cannot come out of JSON, so that every message can be said again.
    let again = serde_json::to_vec(&message).map(|text| serde_json::from_slice::<T>(&text));
    assert!(matches!(again, Ok(Ok(again)) if again == message), "a message is not what it was");
}

/// What runtimes and earlier daemons leave in files: a container's state, its bundle's configuration, a saved grant.
pub fn document(input: &[u8]) {
    let bytes = shaped(input, &samples(&DOCUMENTS));
    if let Ok(oci) = serde_json::from_slice::<OciState>(&bytes)
        && id_is_plain(&oci.id)
    {
        assert!(!oci.id.contains(['/', '\0']), "an id that is a path");
    }
    let device: Result<DeviceName, _> = "lighter.sh/metal=all".parse();
    if let Ok(device) = &device {
        let _ = bundle::calls(&bytes, Path::new("/h"), device);
    }
    let _ = state::parse(&bytes);
}

/// What the kernel writes about processes, control groups and mounts.
pub fn process_text(input: &[u8]) {
    let bytes = shaped(input, &samples(&TEXTS));
    let _ = proc::parse_start_time(&bytes);
    let text = String::from_utf8_lossy(&bytes);
    let _ = proc::parse_pidfd_info(&text);
    let _ = CgroupMounts::parse(&text);
    if let Ok(device) = text.parse::<DeviceName>() {
        assert_eq!(device.to_string(), text, "a name is not printed as it was");
    }
    let Ok(groups) = Cgroups::parse(&text) else { return };
    for id in candidates(&groups, &[]) {
        assert!(
            id.path() != "/" && id.holds(&groups),
            "{:?} identifies everybody or not its own process",
            id.path()
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_samples_are_taken_by_their_parsers() {
        for text in MESSAGES {
            let bytes = text.as_bytes();
            let to = serde_json::from_slice::<ToAgent>(bytes).is_ok();
            assert!(to || serde_json::from_slice::<FromAgent>(bytes).is_ok(), "{text}");
        }
        assert!(serde_json::from_str::<OciState>(DOCUMENTS[0]).is_ok());
        let metal = "lighter.sh/metal=all".parse().unwrap();
        assert!(bundle::calls(DOCUMENTS[1].as_bytes(), Path::new("/h"), &metal).unwrap());
        state::parse(DOCUMENTS[2].as_bytes()).unwrap();
        assert!(!candidates(&Cgroups::parse(TEXTS[0]).unwrap(), &[]).is_empty());
        assert_eq!(proc::parse_start_time(TEXTS[2].as_bytes()), Some(4242));
        assert_eq!(proc::parse_pidfd_info(TEXTS[3]), Some(4242));
    }

    #[test]
    fn an_input_is_itself_or_written_over_a_sample() {
        assert_eq!(shaped(b"\0abc", &[b"xyz"]), b"abc");
        assert_eq!(shaped(b"\x01\0\x01-", &[b"xyz"]), b"x-z");
        assert_eq!(shaped(b"\x01\0\x09!\xff\xff\0\xff\xff\0", &[b"xyz"]), b"xy");
    }

    proptest! {
        #[test]
        fn no_input_panics(bytes in proptest::collection::vec(any::<u8>(), 0..120), choice in 0_u8..9) {
            let input = [&[choice], bytes.as_slice()].concat();
            for entry in [sock_diag, engine_answer, hook_message, document, process_text] {
                entry(&input);
            }
        }
    }
}
