// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice against engines that are fast, slow, wrong and broken.

use proptest::prelude::*;

use super::*;

fn candidates(engines: &[EngineIndex]) -> Vec<Candidate> {
    engines.iter().map(|engine| Candidate { engine: *engine, known: None }).collect()
}

/// How an engine behaves.
#[derive(Debug, Clone)]
enum Engine {
    Right { us: u64 },
    Wrong,
    CrashesWhileTimed,
}

fn crash() -> Event {
    Event::Bad(End::Crashed { text: "signal 6".to_owned() })
}

/// Plays a choice to its end; the steps that were taken and the results.
fn play(
    candidates: Vec<Candidate>,
    pinned: bool,
    cpu_us: u64,
    engines: &[Engine],
) -> (Vec<Step>, Vec<Finished>) {
    let (mut choice, mut step) = Choice::new(candidates, pinned);
    let (mut steps, mut results) = (vec![step.clone()], Vec::new());
    loop {
        let event = match &step {
            Step::Sample => Event::Sampled,
            Step::Attempt(engine) => match engines[*engine] {
                Engine::Wrong => Event::Bad(End::Wrong { text: "1 in place of 2".to_owned() }),
                _ => Event::Right { largest: 0.0, compile_us: Some(1) },
            },
            Step::Time(None) => Event::Timed(cpu_us),
            Step::Time(Some(engine)) => match engines[*engine] {
                Engine::Right { us } => Event::Timed(us),
                _ => crash(),
            },
            Step::Settled(_) => return (steps, results),
        };
        step = choice.take(event).expect("a step follows each event");
        results.extend(choice.results());
        steps.push(step.clone());
        assert!(steps.len() < 1000, "it never ends");
    }
}

fn chosen(candidates: Vec<Candidate>, pinned: bool, cpu_us: u64, engines: &[Engine]) -> Option<EngineIndex> {
    match play(candidates, pinned, cpu_us, engines).0.last() {
        Some(Step::Settled(engine)) => *engine,
        other => panic!("{other:?}"),
    }
}

#[test]
fn runs_are_interleaved_five_of_each() {
    let (steps, results) = play(candidates(&[0]), false, 100, &[Engine::Right { us: 50 }]);
    let mut expected = vec![Step::Sample, Step::Attempt(0)];
    expected.extend((0..ROUNDS).flat_map(|_| [Step::Time(None), Step::Time(Some(0))]));
    expected.push(Step::Settled(Some(0)));
    assert_eq!(steps, expected);
    let end = End::Agreed { largest: 0.0, compile_us: Some(1), us: Some(50), cpu_us: Some(100) };
    assert_eq!(results, [Finished { engine: 0, end }]);
}

#[test]
fn a_tenth_is_the_margin() {
    let one = |us| chosen(candidates(&[0]), false, 100, &[Engine::Right { us }]);
    assert_eq!((one(90), one(91), one(100)), (Some(0), None, None));
}

#[test]
fn the_fastest_right_one_wins() {
    let engines =
        [Engine::Right { us: 50 }, Engine::Wrong, Engine::Right { us: 20 }, Engine::CrashesWhileTimed];
    assert_eq!(chosen(candidates(&[0, 1, 2, 3]), false, 100, &engines), Some(2));
    assert_eq!(chosen(candidates(&[1, 3]), false, 100, &engines), None);
    let (_, results) = play(candidates(&[0, 1, 2, 3]), false, 100, &engines);
    assert_eq!(results.len(), 4, "each is written down");
}

#[test]
fn a_pinned_engine_needs_to_be_right_and_not_fast() {
    let engines = [Engine::Wrong, Engine::Right { us: 900 }];
    let (steps, results) = play(candidates(&[0, 1]), true, 100, &engines);
    assert_eq!(steps, [Step::Sample, Step::Attempt(0), Step::Attempt(1), Step::Settled(Some(1))]);
    assert!(matches!(results[1].end, End::Agreed { us: None, .. }));
}

#[test]
fn what_is_known_is_not_timed_again_and_the_slow_not_tried_again() {
    let known = |engine, own, cpu| Candidate { engine, known: Some((own, cpu)) };
    let engines = [Engine::Right { us: 1 }, Engine::Right { us: 1 }];
    let (steps, _) = play(vec![known(0, 50, 100), known(1, 99, 100)], false, 100, &engines);
    assert_eq!(steps, [Step::Sample, Step::Attempt(0), Step::Settled(Some(0))]);
    assert_eq!(play(vec![known(0, 99, 100)], false, 100, &engines).0, [Step::Settled(None)]);
    assert_eq!(
        play(vec![known(0, 50, 100)], false, 100, &[Engine::Wrong]).0.last(),
        Some(&Step::Settled(None))
    );
}

#[test]
fn without_candidates_nothing_is_done() {
    assert_eq!(Choice::new(Vec::new(), false).1, Step::Settled(None));
}

#[test]
fn without_the_processor_there_is_no_choice() {
    let (mut choice, _) = Choice::new(candidates(&[0]), false);
    assert_eq!(choice.take(Event::Broken), Some(Step::Settled(None)));
    assert_eq!(choice.take(Event::Sampled), None);
}

#[test]
fn late_words_change_nothing() {
    let (mut choice, _) = Choice::new(candidates(&[0, 1]), false);
    assert_eq!(choice.take(Event::Timed(1)), None);
    assert_eq!(choice.take(crash()), None);
    assert_eq!(choice.take(Event::Sampled), Some(Step::Attempt(0)));
    assert_eq!(choice.trying(), Some(0));
    assert_eq!(choice.take(Event::Sampled), None);
    assert_eq!(choice.take(crash()), Some(Step::Attempt(1)));
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Sampled),
        Just(Event::Broken),
        Just(Event::Right { largest: 0.0, compile_us: None }),
        Just(crash()),
        any::<u64>().prop_map(Event::Timed),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_only_a_right_engine_is_chosen(
        events in prop::collection::vec(any_event(), 0..100), count in 0usize..4, pinned: bool,
    ) {
        let (mut choice, first) = Choice::new(candidates(&(0..count).collect::<Vec<_>>()), pinned);
        let (mut right, mut step) = (Vec::new(), first);
        for event in events {
            let trying = choice.trying();
            if let (Event::Right { .. }, Some(engine)) = (&event, trying) {
                right.push(engine);
            }
            if let Some(next) = choice.take(event) {
                step = next;
            }
        }
        if let Step::Settled(Some(engine)) = step {
            prop_assert!(right.contains(&engine));
        }
    }
}
