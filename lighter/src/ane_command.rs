// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter ane`: the models that the ane device has seen, which engine each is computed by and why, and how to have one
//! judged anew.
//!
//! All of it is in the journal, a file that the service keeps, so that the commands work whether or not a daemon runs;
//! a running one notices what they write.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use lighter_devices::ane::control::ModelHash;
use lighter_devices::ane::journal::{End, Journal, Line, ModelFacts, Record, now_s};
use serde::Serialize;

use crate::config::Config;
use crate::control::{self, Request};
use crate::output;

/// The subcommands of `lighter ane`.
#[derive(Debug, Subcommand)]
pub(crate) enum AneCommand {
    /// List the models and the engine chosen for each
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what was tried with one model, and how it went
    Show {
        /// Start of its hash (4 digits or more), or its name
        model: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Forget all about one model: its engines are tried anew with its next run
    Forget {
        /// Start of its hash (4 digits or more), or its name
        model: String,
    },
}

#[derive(Debug, Serialize)]
struct Listing {
    journal: String,
    daemon_is_running: bool,
    unreadable_lines: u64,
    models: Vec<Model>,
}

#[derive(Debug, Serialize)]
struct Model {
    model: ModelHash,
    label: String,
    bytes: u64,
    seen_s: u64,
    chosen: BTreeMap<String, String>,
    attempts: Vec<Attempt>,
}

#[derive(Debug, Serialize)]
struct Attempt {
    engine: String,
    shapes: String,
    build: String,
    failures: u32,
    open: u32,
    last: Option<End>,
}

/// Runs `lighter ane`.
pub(crate) fn run(command: &AneCommand, config: &Config) -> anyhow::Result<ExitCode> {
    let mut journal = Journal::new(&config.ane.state_dir);
    journal.refresh()?;
    let daemon_is_running = control::ask(&config.daemon.control_socket(), &Request::Status).is_ok();
    match command {
        AneCommand::List { json } => {
            let models = journal.fold().models().iter().map(|(hash, facts)| model(*hash, facts)).collect();
            let listing = Listing {
                journal: journal.path().display().to_string(),
                daemon_is_running,
                unreadable_lines: journal.fold().unreadable(),
                models,
            };
            if *json { output::json(&listing)? } else { output::line(&render_list(&listing))? }
        }
        AneCommand::Show { model: name, json } => {
            let hash = find(&journal, name)?;
            let facts = journal.fold().models().get(&hash).context("the model is gone from the journal")?;
            let model = model(hash, facts);
            if *json { output::json(&model)? } else { output::line(&render_model(&model))? }
        }
        AneCommand::Forget { model: name } => {
            let hash = find(&journal, name)?;
            journal.append(&[Line::Forgot { at_s: now_s(), model: hash }])?;
            output::line(&format!("forgotten: model {}", short(hash)))?;
            output::line(if daemon_is_running {
                "the running service tries its engines anew with its next run"
            } else {
                "no daemon is running: its engines are tried anew after the next `lighter start`"
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn find(journal: &Journal, name: &str) -> anyhow::Result<ModelHash> {
    match journal.fold().find(name).as_slice() {
        [hash] => Ok(*hash),
        [] => bail!(
            "no model {name:?} in {}: give the start of a hash (4 digits or more) or a name as `lighter ane list` has it",
            journal.path().display()
        ),
        several => {
            let several: Vec<String> = several.iter().map(|hash| short(*hash)).collect();
            bail!("{name:?} means {} models: {}; give more of the hash", several.len(), several.join(", "))
        }
    }
}

fn short(hash: ModelHash) -> String {
    hash.to_string().chars().take(12).collect()
}

fn model(hash: ModelHash, facts: &ModelFacts) -> Model {
    let attempt = |(key, record): (&lighter_devices::ane::journal::Key, &Record)| Attempt {
        engine: key.engine.clone(),
        shapes: key.shapes.clone(),
        build: key.build.clone(),
        failures: record.failures,
        open: record.open,
        last: record.last.clone(),
    };
    Model {
        model: hash,
        label: facts.label.clone(),
        bytes: facts.proto_bytes.saturating_add(facts.weights_bytes),
        seen_s: facts.seen_s,
        chosen: facts
            .chosen
            .iter()
            .map(|(shapes, chosen)| (shapes.clone(), chosen.key.engine.clone()))
            .collect(),
        // Without shapes it is the loading of a model, which is no choice.
        attempts: facts
            .records
            .iter()
            .filter(|(key, record)| !key.shapes.is_empty() || record.failures > 0)
            .map(attempt)
            .collect(),
    }
}

fn render_list(listing: &Listing) -> String {
    let mut lines = Vec::new();
    if listing.models.is_empty() {
        lines.push(format!("no model yet ({})", listing.journal));
    }
    for model in &listing.models {
        let chosen: Vec<String> =
            model.chosen.iter().map(|(shapes, engine)| format!("{shapes}: {engine}")).collect();
        let chosen = if chosen.is_empty() { "not chosen yet".to_owned() } else { chosen.join(", ") };
        let label = if model.label.is_empty() { "-" } else { &model.label };
        lines.push(format!("{}  {:>11}  {label}  {chosen}", short(model.model), size(model.bytes)));
    }
    if listing.unreadable_lines > 0 {
        lines.push(format!("{} lines of {} cannot be read", listing.unreadable_lines, listing.journal));
    }
    lines.push(format!(
        "from {}; {}",
        listing.journal,
        if listing.daemon_is_running { "the daemon is running" } else { "no daemon is running" }
    ));
    lines.join("\n")
}

fn render_model(model: &Model) -> String {
    let mut lines = vec![
        format!("model   {}", model.model),
        format!("name    {}", if model.label.is_empty() { "-" } else { &model.label }),
        format!("size    {}", size(model.bytes)),
    ];
    for (shapes, engine) in &model.chosen {
        lines.push(format!("chosen  {engine} for {shapes}"));
    }
    for attempt in &model.attempts {
        let shapes = if attempt.shapes.is_empty() { "loading" } else { &attempt.shapes };
        lines.push(format!("tried   {} for {shapes}: {}", attempt.engine, outcome(attempt)));
        lines.push(format!("        {}", attempt.build));
    }
    lines.join("\n")
}

fn outcome(attempt: &Attempt) -> String {
    let last = match &attempt.last {
        None => "under way, or the service ended while it was".to_owned(),
        Some(End::Agreed { largest, us: Some(us), cpu_us: Some(cpu_us), .. }) => {
            format!("right (largest difference {largest:.1e}), {us} us against the processor's {cpu_us} us")
        }
        Some(End::Agreed { largest, .. }) => format!("right (largest difference {largest:.1e})"),
        Some(End::Wrong { text }) => format!("answers wrongly: {text}"),
        Some(End::Failed { text }) => format!("fails: {text}"),
        Some(End::Crashed { text }) => format!("crashes: {text}"),
        Some(End::Hung { text }) => format!("hangs: {text}"),
    };
    match attempt.failures {
        0 | 1 => last,
        failures => format!("{last} ({failures} failures)"),
    }
}

#[allow(clippy::cast_precision_loss, reason = "for a person")]
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use lighter_devices::ane::journal::Key;

    use super::*;

    fn journal(folder: &std::path::Path) -> Journal {
        let mut journal = Journal::new(folder);
        let (first, second) = (ModelHash([0x11; 32]), ModelHash([0x12; 32]));
        let key = |model| Key {
            model,
            shapes: "1x3".to_owned(),
            engine: "cuda".to_owned(),
            build: "cuda, ONNX Runtime 1.32.0".to_owned(),
        };
        let seen = |model, label: &str| Line::Model {
            at_s: 1,
            model,
            label: label.to_owned(),
            proto_bytes: 1000,
            weights_bytes: 2_000_000,
        };
        let end = End::Wrong { text: "1 in place of 2".to_owned() };
        let lines = [
            seen(first, "resnet50"),
            seen(second, ""),
            Line::Attempt { at_s: 2, key: key(first) },
            Line::Ended { at_s: 3, key: key(first), end },
            Line::Chosen { at_s: 4, key: Key { engine: "cpu".to_owned(), ..key(first) } },
        ];
        journal.append(&lines).unwrap();
        journal
    }

    #[test]
    fn a_model_is_found_by_what_names_it_alone() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(folder.path());
        assert_eq!(find(&journal, "resnet50").unwrap(), ModelHash([0x11; 32]));
        assert_eq!(find(&journal, "1212").unwrap(), ModelHash([0x12; 32]));
        assert!(find(&journal, "nope").unwrap_err().to_string().contains("lighter ane list"));
    }

    #[test]
    fn the_texts_say_what_was_chosen_and_why() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(folder.path());
        let models: Vec<Model> =
            journal.fold().models().iter().map(|(hash, facts)| model(*hash, facts)).collect();
        let shown = render_model(&models[0]);
        assert!(shown.contains("chosen  cpu for 1x3"), "{shown}");
        assert!(shown.contains("tried   cuda for 1x3: answers wrongly: 1 in place of 2"), "{shown}");
        let listing =
            Listing { journal: "/j".to_owned(), daemon_is_running: false, unreadable_lines: 1, models };
        let text = render_list(&listing);
        assert!(text.contains("111111111111       2.0 MB  resnet50  1x3: cpu"), "{text}");
        assert!(text.contains("not chosen yet") && text.contains("1 lines of /j"), "{text}");
    }
}
