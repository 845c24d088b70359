// SPDX-License-Identifier: MIT OR Apache-2.0
//! The journal against crashes, torn lines and other writers.

use proptest::prelude::*;

use super::*;

const NOW: u64 = 1_800_000_000;

fn hash(byte: u8) -> ModelHash {
    ModelHash([byte; 32])
}

fn key(byte: u8) -> Key {
    Key {
        model: hash(byte),
        shapes: "1x3".to_owned(),
        engine: "openvino-cpu".to_owned(),
        build: "1.24.1".to_owned(),
    }
}

fn attempt(byte: u8) -> Line {
    Line::Attempt { at_s: NOW, key: key(byte) }
}

fn ended(byte: u8, end: End) -> Line {
    Line::Ended { at_s: NOW, key: key(byte), end }
}

fn agreed(us: u64) -> End {
    End::Agreed { largest: 0.0, compile_us: Some(9), us: Some(us), cpu_us: Some(100) }
}

fn crashed() -> End {
    End::Crashed { text: "signal 11".to_owned() }
}

fn advice(lines: &[Line]) -> Advice {
    let mut fold = Fold::default();
    lines.iter().for_each(|line| fold.add(line));
    fold.advice(&key(1), 2, 0, NOW)
}

#[test]
fn an_attempt_without_an_end_is_a_crash_and_a_second_one_the_last() {
    assert_eq!(advice(&[]), Advice::Try);
    assert_eq!(advice(&[attempt(1)]), Advice::Try);
    let Advice::Skip { reason } = advice(&[attempt(1), attempt(1)]) else { panic!("is tried again") };
    assert!(reason.contains("2 times") && reason.contains("the service ended"), "{reason}");
    let mut fold = Fold::default();
    [attempt(1), attempt(1)].iter().for_each(|line| fold.add(line));
    assert_eq!(fold.advice(&key(1), 2, 1, NOW), Advice::Try, "one of them runs");
}

#[test]
fn failures_are_bounded_and_wrong_answers_final() {
    let once = [attempt(1), ended(1, crashed())];
    assert_eq!(advice(&once), Advice::Try);
    let twice = [attempt(1), ended(1, crashed()), attempt(1), ended(1, crashed())];
    let Advice::Skip { reason } = advice(&twice) else { panic!("is tried again") };
    assert!(reason.contains("signal 11"), "{reason}");
    let wrong = [attempt(1), ended(1, End::Wrong { text: "7 in place of 8".to_owned() })];
    assert!(matches!(advice(&wrong), Advice::Skip { reason } if reason.contains("7 in place of 8")));
    assert_eq!(advice(&[attempt(2), attempt(2)]), Advice::Try, "another model");
}

#[test]
fn times_are_known_for_a_while() {
    let lines = [attempt(1), ended(1, agreed(40))];
    assert_eq!(advice(&lines), Advice::Known { us: 40, cpu_us: 100 });
    let mut fold = Fold::default();
    lines.iter().for_each(|line| fold.add(line));
    assert_eq!(fold.advice(&key(1), 2, 0, NOW + 30 * 24 * 3600), Advice::Try);
}

#[test]
fn forgetting_a_model_forgets_all_of_it() {
    let lines = [
        attempt(1),
        ended(1, End::Wrong { text: String::new() }),
        Line::Chosen { at_s: NOW, key: key(1) },
        Line::Forgot { at_s: NOW, model: hash(1) },
    ];
    assert_eq!(advice(&lines), Advice::Try);
    let mut fold = Fold::default();
    lines.iter().for_each(|line| fold.add(line));
    assert!(fold.models().is_empty());
}

#[test]
fn models_are_found_by_the_start_of_their_hash_and_by_name() {
    let mut fold = Fold::default();
    for (byte, label) in [(0x11, "resnet50"), (0x12, "")] {
        fold.add(&Line::Model {
            at_s: NOW,
            model: hash(byte),
            label: label.to_owned(),
            proto_bytes: 1,
            weights_bytes: 0,
        });
    }
    assert_eq!(fold.find("1111"), [hash(0x11)]);
    assert_eq!(fold.find("resnet50"), [hash(0x11)]);
    for none in ["", "1", "111", "1113", "resnet"] {
        assert!(fold.find(none).is_empty(), "{none:?}");
    }
}

#[test]
fn a_torn_or_foreign_line_costs_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = Journal::new(&folder.path().join("deep/er"));
    journal.append(&[attempt(1), ended(1, agreed(40))]).unwrap();
    let mut file = OpenOptions::new().append(true).open(journal.path()).unwrap();
    file.write_all(b"{\"attempt\":{\"at_s\":1,\"key\"\n{\"future\":{}}\n\xff\n").unwrap();
    file.write_all(&[b'x'; 10_000]).unwrap();
    file.write_all(b"\n{\"attempt\":{\"at_s\":7").unwrap();
    let mut again = Journal::new(&folder.path().join("deep/er"));
    again.append(&[ended(2, crashed())]).unwrap();
    assert_eq!(again.fold().unreadable(), 5);
    assert_eq!(again.fold().models().len(), 2);
    assert_eq!(again.fold().advice(&key(1), 2, 0, NOW), Advice::Known { us: 40, cpu_us: 100 });
}

#[test]
fn what_another_process_adds_is_read_and_nothing_twice() {
    let folder = tempfile::tempdir().unwrap();
    let (mut service, mut command) = (Journal::new(folder.path()), Journal::new(folder.path()));
    assert!(service.refresh().unwrap().models().is_empty(), "there is no file");
    service.append(&[attempt(1)]).unwrap();
    service.append(&[ended(1, crashed())]).unwrap();
    command.append(&[Line::Forgot { at_s: NOW, model: hash(1) }]).unwrap();
    assert!(service.fold().models().contains_key(&hash(1)));
    assert!(service.refresh().unwrap().models().is_empty());
    service.append(&[attempt(1)]).unwrap();
    let record = &service.refresh().unwrap().models()[&hash(1)].records[&key(1)];
    assert_eq!((record.open, record.failures), (1, 0));
}

#[test]
fn a_long_journal_is_written_anew_and_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = Journal::new(folder.path());
    let lines: Vec<Line> =
        (0..16_000).flat_map(|_| [attempt(1), ended(1, agreed(40))]).chain([attempt(2)]).collect();
    journal.append(&lines).unwrap();
    assert!(fs::metadata(journal.path()).unwrap().len() > COMPACT_BYTES);
    journal.append(&[ended(2, crashed())]).unwrap();
    assert!(fs::metadata(journal.path()).unwrap().len() < 10_000);
    let mut again = Journal::new(folder.path());
    assert_eq!(again.refresh().unwrap().models(), journal.fold().models());
    assert_eq!(again.fold().advice(&key(2), 1, 0, NOW), journal.fold().advice(&key(2), 1, 0, NOW));
    assert!(matches!(again.fold().advice(&key(2), 1, 0, NOW), Advice::Skip { .. }));
}

#[test]
fn long_shapes_have_a_short_name() {
    let many = Shapes(vec![vec![1, 2, 3]; 300]);
    let other = Shapes([vec![vec![1, 2, 3]; 299], vec![vec![1, 2, 4]]].concat());
    assert!(shapes_text(&many).len() < 40);
    assert_ne!(shapes_text(&many), shapes_text(&other));
    assert_eq!(shapes_text(&Shapes(vec![vec![2, 3]])), "2x3");
}

fn any_line() -> impl Strategy<Value = Line> {
    prop_oneof![
        (0u8..4).prop_map(attempt),
        (0u8..4, 0u64..200).prop_map(|(byte, us)| ended(byte, agreed(us))),
        (0u8..4).prop_map(|byte| ended(byte, crashed())),
        (0u8..4).prop_map(|byte| ended(byte, End::Wrong { text: "x".to_owned() })),
        (0u8..4).prop_map(|byte| Line::Chosen { at_s: NOW, key: key(byte) }),
        (0u8..4).prop_map(|byte| Line::Forgot { at_s: NOW, model: hash(byte) }),
    ]
}

proptest! {
    #[test]
    fn written_anew_it_gives_the_same_advice(lines in prop::collection::vec(any_line(), 0..60)) {
        let (mut before, mut after) = (Fold::default(), Fold::default());
        lines.iter().for_each(|line| before.add(line));
        before.lines().iter().for_each(|line| after.add(line));
        for byte in 0..4 {
            for attempts in 1..4 {
                prop_assert_eq!(
                    before.advice(&key(byte), attempts, 0, NOW),
                    after.advice(&key(byte), attempts, 0, NOW)
                );
            }
        }
    }

    #[test]
    fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::new(folder.path());
        fs::write(journal.path(), &bytes).unwrap();
        journal.append(&[attempt(1)]).unwrap();
        prop_assert!(journal.fold().models().contains_key(&hash(1)));
    }
}
