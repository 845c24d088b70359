// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gate's cases, one row each.

use proptest::prelude::*;

use super::*;
use crate::cgroup::candidates;

const A: &str = "0::/docker/a\n";
const IN_A: &str = "0::/docker/a/docker/b\n";
const C: &str = "0::/docker/c\n";
const HOST: &str = "0::/user.slice\n";

fn cgroups(text: &str) -> Cgroups {
    Cgroups::parse(text).unwrap()
}

fn cgroup(text: &str) -> Option<CgroupId> {
    candidates(&cgroups(text), &[]).into_iter().next()
}

fn holder(pid: u32, groups: &str, mount: u64) -> Holder {
    Holder { pid, command: format!("p{pid}"), cgroups: cgroups(groups), mount_ns: NsId::fake(mount) }
}

fn grant(id: &str, kind: Kind, record: Record) -> Grant {
    Grant { id: GrantId(id.into()), kind, record }
}

fn container(id: &str, groups: Option<&str>, mount: Option<u64>, grants: Vec<Grant>) -> Container {
    Container { id: id.into(), cgroup: groups.and_then(cgroup), mount_ns: mount.map(NsId::fake), grants }
}

fn metal(id: &str) -> Vec<Grant> {
    vec![grant(id, Kind::Metal, Record::Confirmed)]
}

fn allow(grant: &str, pid: u32) -> Decision {
    Decision::Allow { grant: GrantId(grant.into()), pid }
}

fn denied() -> Record {
    Record::Denied { reason: "no".into() }
}

/// Name, peer, containers; the decision, or the word of the refusal.
type Case = (&'static str, Peer, Vec<Container>, Result<Decision, &'static str>);

#[test]
fn every_situation_has_its_decision() {
    use Record::{Confirmed, Unasked};
    let two = || {
        vec![
            container("a", Some(A), Some(10), metal("ga")),
            container("c", Some(C), Some(20), vec![grant("gc", Kind::Gpu, Confirmed)]),
        ]
    };
    let held = Peer::Held;
    let ask = |id: &str| Decision::AskRecord { grant: GrantId(id.into()) };
    let cases: Vec<Case> = vec![
        ("the container's own process", held(vec![holder(1, A, 10)]), two(), Ok(allow("ga", 1))),
        ("exec: same group, own mount namespace", held(vec![holder(1, A, 99)]), two(), Ok(allow("ga", 1))),
        (
            "moved out of its group: mount namespace",
            held(vec![holder(1, HOST, 10)]),
            two(),
            Ok(allow("ga", 1)),
        ),
        ("a container in it", held(vec![holder(1, IN_A, 77)]), two(), Ok(allow("ga", 1))),
        (
            "parent and child hold it",
            held(vec![holder(1, A, 10), holder(2, A, 10)]),
            two(),
            Ok(allow("ga", 1)),
        ),
        ("gone", Peer::Gone, two(), Err("peer_gone")),
        ("nobody", Peer::NoHolder { unreadable: 0 }, two(), Err("no_holder")),
        ("unknown", Peer::Unknown { reason: "x".into() }, two(), Err("lookup_failed")),
        ("an empty list is nobody", held(vec![]), two(), Err("no_holder")),
        ("a host process", held(vec![holder(1, HOST, 1)]), two(), Err("stranger")),
        (
            "a process with every group at the root",
            held(vec![holder(1, "0::/\n", 1)]),
            two(),
            Err("stranger"),
        ),
        ("a stranger holds it too", held(vec![holder(1, A, 10), holder(2, HOST, 1)]), two(), Err("stranger")),
        (
            "two containers hold it",
            held(vec![holder(1, A, 10), holder(2, C, 20)]),
            two(),
            Err("shared_socket"),
        ),
        ("it asked for another device", held(vec![holder(1, C, 20)]), two(), Err("other_device")),
        ("no grants at all", held(vec![holder(1, A, 10)]), vec![], Err("stranger")),
        (
            "no own group, as with a rootless engine without cgroups",
            held(vec![holder(1, HOST, 10)]),
            vec![container("a", None, Some(10), metal("ga"))],
            Ok(allow("ga", 1)),
        ),
        (
            "neither own group nor own mounts never matches",
            held(vec![holder(1, HOST, 10)]),
            vec![container("a", None, None, metal("ga"))],
            Err("stranger"),
        ),
        (
            "outermost wins, whatever the order",
            held(vec![holder(1, IN_A, 77)]),
            vec![
                container("b", Some(IN_A), Some(77), metal("gb")),
                container("a", Some(A), Some(10), metal("ga")),
            ],
            Ok(allow("ga", 1)),
        ),
        (
            "group before mount namespace",
            held(vec![holder(1, A, 20)]),
            vec![
                container("c", Some(C), Some(20), metal("gc")),
                container("a", Some(A), Some(10), metal("ga")),
            ],
            Ok(allow("ga", 1)),
        ),
        (
            "the engine is asked first",
            held(vec![holder(1, A, 10)]),
            vec![container("a", Some(A), Some(10), vec![grant("ga", Kind::Metal, Unasked)])],
            Ok(ask("ga")),
        ),
        (
            "the engine says no",
            held(vec![holder(1, A, 10)]),
            vec![container("a", Some(A), Some(10), vec![grant("ga", Kind::Metal, denied())])],
            Err("not_recorded"),
        ),
        (
            "a confirmed name before an unasked or denied one",
            held(vec![holder(1, A, 10)]),
            vec![container(
                "a",
                Some(A),
                Some(10),
                vec![
                    grant("g1", Kind::Metal, denied()),
                    grant("g2", Kind::Metal, Unasked),
                    grant("g3", Kind::Metal, Confirmed),
                ],
            )],
            Ok(allow("g3", 1)),
        ),
        (
            "an unasked name before a denied one",
            held(vec![holder(1, A, 10)]),
            vec![container(
                "a",
                Some(A),
                Some(10),
                vec![grant("g1", Kind::Metal, denied()), grant("g2", Kind::Metal, Unasked)],
            )],
            Ok(ask("g2")),
        ),
    ];
    for (name, peer, containers, expected) in cases {
        let decision = decide(Kind::Metal, &peer, &containers);
        match (&decision, expected) {
            (Decision::Refuse(reason), Err(word)) => assert_eq!(reason.word(), word, "{name}"),
            (decision, Ok(expected)) => assert_eq!(*decision, expected, "{name}"),
            (decision, Err(word)) => panic!("{name}: {decision:?} instead of {word}"),
        }
    }
}

#[test]
fn a_refusal_tells_what_to_do() {
    let decision = decide(
        Kind::Metal,
        &Peer::Held(vec![holder(7, C, 20)]),
        &[container("c", Some(C), Some(20), vec![grant("gc", Kind::Gpu, Record::Confirmed)])],
    );
    let Decision::Refuse(reason) = decision else { panic!("{decision:?}") };
    assert_eq!(
        reason.to_string(),
        "container c was started with gpu, not with metal; start it with --device lighter.sh/metal=all"
    );
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Ane), Just(Kind::Gpu), Just(Kind::Metal)]
}

fn any_record() -> impl Strategy<Value = Record> {
    prop_oneof![Just(Record::Confirmed), Just(Record::Unasked), Just(denied())]
}

fn granted(container: &str, kinds: &[(Kind, Record)]) -> Vec<Grant> {
    let name = |number: usize| format!("g{container}{number}");
    let grants = kinds.iter().enumerate();
    grants.map(|(number, (kind, record))| grant(&name(number), *kind, record.clone())).collect()
}

proptest! {
    /// Whatever else is there: with a holder outside of all containers nothing is let in.
    #[test]
    fn one_stranger_is_enough_to_refuse(groups in proptest::collection::vec("(a|c|x)(/[a-c]){0,2}", 1..6)) {
        let holders: Vec<Holder> = (1..).zip(&groups)
            .map(|(pid, path)| holder(pid, &format!("0::/docker/{path}\n"), 99))
            .collect();
        let containers = [
            container("a", Some(A), Some(10), metal("ga")),
            container("c", Some(C), Some(20), metal("gc")),
        ];
        let strangers = groups.iter().any(|path| path.starts_with('x'));
        let decision = decide(Kind::Metal, &Peer::Held(holders), &containers);
        prop_assert!(!strangers || matches!(decision, Decision::Refuse(_)));
        let one = groups.iter().all(|path| path.starts_with('a')) || groups.iter().all(|path| path.starts_with('c'));
        prop_assert_eq!(one, matches!(decision, Decision::Allow { .. }));
    }

    /// A unix peer is one process: it is let in exactly when its container has a confirmed grant for the device.
    #[test]
    fn one_process_gets_what_its_container_was_granted(
        group in "(a|c|x)", own_mounts in 10_u64..40, kind in any_kind(), kinds in
        proptest::collection::vec((any_kind(), any_record()), 0..4),
    ) {
        let containers = [
            container("a", Some(A), Some(10), granted("a", &kinds)),
            container("c", Some(C), Some(20), metal("gc")),
        ];
        let peer = Peer::Held(vec![holder(7, &format!("0::/docker/{group}\n"), own_mounts)]);
        let decision = decide(kind, &peer, &containers);
        let place = match (group.as_str(), own_mounts) {
            ("a", _) | ("x", 10) => Some(0),
            ("c", _) | ("x", 20) => Some(1),
            _ => None,
        };
        let grants = place.and_then(|place| containers.get(place)).map(|container| &container.grants);
        let confirmed = grants.is_some_and(|grants| {
            grants.iter().any(|grant| grant.kind == kind && grant.record == Record::Confirmed)
        });
        prop_assert_eq!(confirmed, matches!(decision, Decision::Allow { pid: 7, .. }), "{:?}", decision);
        if let Decision::Allow { grant, .. } = &decision {
            prop_assert!(grants.unwrap().iter().any(|own| own.id == *grant && own.kind == kind));
        }
        prop_assert_eq!(place.is_none(), matches!(decision, Decision::Refuse(Reason::Stranger { .. })));
    }
}
