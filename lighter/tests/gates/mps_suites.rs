// SPDX-License-Identifier: MIT OR Apache-2.0
//! torch's own list of operators in Debian's images: their torch and their Python, against the newest torch on the host.
//! `tools/op-db --matrix` has the same for the versions of PyPI.

use crate::mps::{SID, TRIXIE, debian, program, settings, usage};
use crate::support::{Daemon, Engine};

/// A part of the list, spread over it.
fn operators(image: &str) {
    let engine = Engine::take();
    let daemon = Daemon::with(&engine, &settings(""));
    let guest = debian(&engine, image);
    let options = ["--smoke", "60", "--samples", "3", "--versions-differ", "--list"];
    let text = program(&guest, &[&["/tests/op_db.py"][..], &options].concat());
    assert!(text.contains(" pass"), "{text}");
    assert!(usage(&daemon)["calls"].as_u64().unwrap() > 100, "{}", daemon.log());
    println!("operators in {image}: {}", text.lines().last().unwrap_or_default());
}

#[test]
#[ignore = "long: part of `make gates`"]
fn operators_of_debian_13_are_as_on_the_processor() {
    operators(TRIXIE);
}

#[test]
#[ignore = "long: part of `make gates`"]
fn operators_of_debian_sid_are_as_on_the_processor() {
    operators(SID);
}
