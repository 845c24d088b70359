// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares with what the reference implementation did in each case of `golden/*.jsonl`.
//!
//! `golden/differences.toml` lists the cases in which this crate decides otherwise on purpose; a case listed
//! there that does not differ fails too. `LIGHTER_CDI_CASES` names another file of cases of the same form.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test states what must hold")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use lighter_cdi::{InjectError, Registry};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Case {
    name: String,
    files: BTreeMap<String, String>,
    #[serde(default)]
    devices: Vec<String>,
    #[serde(default)]
    spec: Value,
    expect: Expect,
}

#[derive(Deserialize)]
struct Expect {
    devices: Option<Vec<String>>,
    files_with_errors: Option<Vec<String>>,
    inject: Option<String>,
    unresolved: Option<Vec<String>>,
    spec: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Differences {
    #[serde(default)]
    difference: Vec<Difference>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Difference {
    case: String,
    reason: String,
}

#[test]
fn every_case_agrees_or_is_a_listed_difference() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut listed = listed_differences(&here.join("differences.toml"));
    let mut failures = Vec::new();
    let mut compare = |path: &Path| {
        let cases = fs::read_to_string(path).unwrap();
        for line in cases.lines() {
            let case: Case = serde_json::from_str(line).unwrap();
            match (disagreement(&case), listed.remove(&case.name)) {
                (Some(what), false) => failures.push(format!("{}: {what}", case.name)),
                (None, true) => failures.push(format!("{}: listed as a difference, but agrees", case.name)),
                _ => {}
            }
        }
        cases.lines().count()
    };

    if let Some(other) = std::env::var_os("LIGHTER_CDI_CASES") {
        assert_ne!(compare(Path::new(&other)), 0, "no case in {}", other.display());
    } else {
        assert_eq!(compare(&here.join("cases.jsonl")), 457, "cases are missing");
        assert_eq!(compare(&here.join("more.jsonl")), 322, "cases are missing");
        failures
            .extend(listed.into_iter().map(|name| format!("{name}: listed as a difference, but no case")));
    }
    assert!(failures.is_empty(), "{} disagree:\n{}", failures.len(), failures.join("\n"));
}

fn listed_differences(path: &Path) -> BTreeSet<String> {
    let differences: Differences = toml::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut listed = BTreeSet::new();
    for Difference { case, reason } in differences.difference {
        assert!(!reason.is_empty(), "{case} has no reason");
        assert!(listed.insert(case.clone()), "{case} is listed twice");
    }
    listed
}

/// What differs in a case, if anything.
fn disagreement(case: &Case) -> Option<String> {
    let root = tempfile::tempdir().unwrap();
    let directories = ["etc", "run"].map(|name| root.path().join(name));
    for directory in &directories {
        fs::create_dir(directory).unwrap();
    }
    for (path, content) in &case.files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    let registry = Registry::scan(&directories);
    let devices: Vec<_> = registry.devices().map(|offer| offer.name.to_owned()).collect();
    let relative = |path: &Path| path.strip_prefix(root.path()).unwrap().to_str().unwrap().to_owned();
    let errors: BTreeSet<_> = registry.errors().map(|(path, _)| relative(path)).collect();
    let expect = &case.expect;
    let expected_errors: BTreeSet<_> = expect.files_with_errors.iter().flatten().cloned().collect();
    if devices != expect.devices.clone().unwrap_or_default() {
        return Some(format!("devices {devices:?}, expected {:?}", expect.devices));
    }
    if errors != expected_errors {
        return Some(format!("files with errors {errors:?}, expected {expected_errors:?}"));
    }
    let expected_result = expect.inject.as_deref()?;

    let mut spec = case.spec.clone();
    let result = registry.inject(&mut spec, &case.devices);
    let (word, unresolved) = match &result {
        Ok(()) => ("ok", Vec::new()),
        Err(InjectError::Unresolved(names)) => ("error", names.clone()),
        Err(_) => ("error", Vec::new()),
    };
    if word != expected_result {
        return Some(format!("injection {result:?}, expected {expected_result}"));
    }
    if unresolved != expect.unresolved.clone().unwrap_or_default() {
        return Some(format!("unresolved {unresolved:?}, expected {:?}", expect.unresolved));
    }
    let expected_spec = match &expect.spec {
        Some(spec) => spec,
        None => &case.spec,
    };
    let (spec, expected_spec) = (significant(&spec), significant(expected_spec));
    (spec != expected_spec).then(|| format!("spec {spec:?}, expected {expected_spec:?}"))
}

/// Absent, null and empty are the same to a runtime.
fn significant(value: &Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::Array(items) if items.is_empty() => None,
        Value::Array(items) => {
            Some(items.iter().map(|item| significant(item).unwrap_or(Value::Null)).collect())
        }
        Value::Object(fields) => {
            let fields: serde_json::Map<_, _> =
                fields.iter().filter_map(|(key, value)| Some((key.clone(), significant(value)?))).collect();
            (!fields.is_empty()).then_some(Value::Object(fields))
        }
        other => Some(other.clone()),
    }
}
