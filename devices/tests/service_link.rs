// SPDX-License-Identifier: MIT OR Apache-2.0
//! The daemon's end and the service's end of the control socket against each other, and against ends that break.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lighter_devices::service::{
    LinkError, ReportAnswer, RevokeAnswer, ServeError, Service, ServiceLink, serve,
};
use lighter_wire::{
    CONTROL_VERSION, EngineState, FromService, GrantId, Owner, ServiceReport, StreamOffer, ToService, recv,
    send,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

const LONG: Duration = Duration::from_secs(20);

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn offer(grant: &str, stream: u64) -> StreamOffer {
    StreamOffer {
        stream,
        grant: GrantId(grant.to_owned()),
        container: "c1".to_owned(),
        owner: Owner("c1".to_owned()),
        device: "all".to_owned(),
        peer_pid: None,
        groups: Vec::new(),
    }
}

/// Writes the grant into each stream; never confirms the grant `stuck`, never answers for reports when told so.
#[derive(Default)]
struct Echo {
    is_mute: bool,
    kept: Vec<RevokeAnswer>,
    reports: Vec<ReportAnswer>,
}

impl Service for Echo {
    fn stream(&mut self, offer: StreamOffer, socket: OwnedFd) {
        UnixStream::from(socket).write_all(offer.grant.0.as_bytes()).unwrap();
    }

    fn revoke(&mut self, grant: GrantId, answer: RevokeAnswer) {
        if grant.0 == "stuck" { self.kept.push(answer) } else { answer.done() }
    }

    fn report(&mut self, answer: ReportAnswer) {
        if self.is_mute {
            self.reports.push(answer);
            return;
        }
        answer.send(ServiceReport {
            engine: EngineState::Available { name: "CPU".into(), version: "1".into() },
            containers: [].into(),
            totals: [("workers".to_owned(), 0)].into(),
            troubles: Vec::new(),
        });
    }
}

fn started(mut service: Echo) -> (ServiceLink, JoinHandle<Result<(), ServeError>>) {
    let (ours, theirs) = pair();
    let thread = std::thread::spawn(move || serve(theirs, &mut service));
    (ServiceLink::connect(ours, LONG).unwrap(), thread)
}

#[test]
fn streams_revokes_and_reports_go_through_from_many_threads() {
    let (link, thread) = started(Echo::default());
    let link = Arc::new(link);
    let users: Vec<JoinHandle<()>> = (0..8)
        .map(|user| {
            let link = Arc::clone(&link);
            std::thread::spawn(move || {
                let grant = format!("g{user}");
                for number in 0..20 {
                    let (mut near, far) = UnixStream::pair().unwrap();
                    link.hand_over(&offer(&grant, number), far.into()).unwrap();
                    let mut text = String::new();
                    near.read_to_string(&mut text).unwrap();
                    assert_eq!(text, grant);
                    link.revoke(&GrantId(grant.clone()), LONG).unwrap();
                    assert!(link.report(LONG).unwrap().totals.contains_key("workers"));
                }
            })
        })
        .collect();
    for user in users {
        user.join().unwrap();
    }
    assert!(link.is_alive());
    link.close();
    thread.join().unwrap().unwrap();
    assert!(matches!(link.report(LONG), Err(LinkError::Ended { .. })));
}

#[test]
fn a_service_that_does_not_answer_costs_its_limit_and_others_go_on() {
    let (link, _thread) = started(Echo { is_mute: true, ..Echo::default() });
    let limit = Duration::from_millis(50);
    assert!(matches!(link.report(limit), Err(LinkError::Late { .. })));
    assert!(matches!(link.revoke(&GrantId("stuck".into()), limit), Err(LinkError::Late { .. })));
    link.revoke(&GrantId("other".into()), LONG).unwrap();
}

#[test]
fn the_end_of_the_service_wakes_who_waits_for_it() {
    let (ours, theirs) = pair();
    let service = std::thread::spawn(move || {
        let hello = recv::<ToService>(&theirs).unwrap().unwrap();
        assert_eq!(hello.0, ToService::Hello { version: CONTROL_VERSION });
        send(&theirs, &FromService::Ready { version: CONTROL_VERSION }, &[]).unwrap();
        // Dies on the first request.
        recv::<ToService>(&theirs).unwrap();
    });
    let link = ServiceLink::connect(ours, LONG).unwrap();
    let begun = Instant::now();
    assert!(matches!(link.report(Duration::from_secs(600)), Err(LinkError::Ended { .. })));
    assert!(begun.elapsed() < Duration::from_secs(500));
    service.join().unwrap();
    assert!(!link.is_alive());
    let (near, far) = UnixStream::pair().unwrap();
    assert!(matches!(link.hand_over(&offer("g", 1), far.into()), Err(LinkError::Ended { .. })));
    let mut rest = Vec::new();
    (&near).read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "the stream is closed, not kept");
}

#[test]
fn other_versions_and_strangers_are_refused_on_both_ends() {
    let (ours, theirs) = pair();
    send(&ours, &ToService::Hello { version: CONTROL_VERSION + 1 }, &[]).unwrap();
    assert!(matches!(serve(theirs, &mut Echo::default()), Err(ServeError::Version { .. })));

    let (ours, theirs) = pair();
    send(&ours, &ToService::Report { seq: 1 }, &[]).unwrap();
    assert!(matches!(serve(theirs, &mut Echo::default()), Err(ServeError::NoHello)));

    let (ours, theirs) = pair();
    send(&theirs, &FromService::Ready { version: CONTROL_VERSION + 1 }, &[]).unwrap();
    assert!(matches!(ServiceLink::connect(ours, LONG), Err(LinkError::Version { .. })));

    let (ours, _theirs) = pair();
    assert!(matches!(ServiceLink::connect(ours, Duration::from_millis(30)), Err(LinkError::Late { .. })));
}
