// SPDX-License-Identifier: MIT OR Apache-2.0
//! `lighter config`: shows, reads and changes the configuration file, keeping its comments and order.
//!
//! A change is checked as a whole before the file is replaced, so a bad value never reaches the disk; a running
//! daemon is told to read the file again.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand, ValueEnum};
use lighter_wire::Kind;
use toml_edit::{DocumentMut, Item, Table, Value};

use crate::config::Config;
use crate::control::{self, Reply, Request};
use crate::output;

/// Arguments of `lighter config`.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Switch the gpu device on or off
    #[arg(long, value_name = "on|off")]
    gpu: Option<Switch>,
    /// Switch the metal device on or off
    #[arg(long, value_name = "on|off")]
    metal: Option<Switch>,
    /// Switch the ane device on or off
    #[arg(long, value_name = "on|off")]
    ane: Option<Switch>,
    /// Switch the mps device on or off
    #[arg(long, value_name = "on|off")]
    mps: Option<Switch>,
    /// The Python interpreter whose torch serves the mps device; empty searches for one
    #[arg(long, value_name = "PATH")]
    torch_python: Option<String>,
    #[command(subcommand)]
    action: Option<ConfigAction>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Debug, Subcommand)]
enum ConfigAction {
    /// Print one key's effective value, or all of them
    Get {
        /// Dotted key, as `metal.engine`
        key: Option<String>,
    },
    /// Set one key
    Set {
        /// Dotted key, as `metal.engine`
        key: String,
        /// The value, in TOML's notation; a bare word is a string
        value: String,
    },
    /// Remove one key from the file, so that its default holds again
    Unset {
        /// Dotted key
        key: String,
    },
    /// Print the path of the configuration file
    Path,
}

/// Runs `lighter config`.
pub(crate) fn run(args: &ConfigArgs, path: &Path) -> anyhow::Result<ExitCode> {
    let changes = flag_changes(args)?;
    match &args.action {
        Some(_) if !changes.is_empty() => bail!("give either device switches or a subcommand, not both"),
        None if !changes.is_empty() => change(path, &changes)?,
        None | Some(ConfigAction::Get { key: None }) => {
            for (key, value) in Config::load(path)?.flatten() {
                output::line(&format!("{key} = {value}"))?;
            }
        }
        Some(ConfigAction::Get { key: Some(key) }) => {
            let flat = Config::load(path)?.flatten();
            let value = flat.get(key).with_context(|| unknown_key(key, flat.keys()))?;
            output::line(value)?;
        }
        Some(ConfigAction::Set { key, value }) => change(path, &[(key.clone(), Some(value.clone()))])?,
        Some(ConfigAction::Unset { key }) => change(path, &[(key.clone(), None)])?,
        Some(ConfigAction::Path) => output::line(&path.display().to_string())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn unknown_key<'a>(key: &str, known: impl Iterator<Item = &'a String>) -> String {
    let known: Vec<&str> = known.map(String::as_str).collect();
    format!("no key {key:?} is set; the keys are {}", known.join(", "))
}

fn flag_changes(args: &ConfigArgs) -> anyhow::Result<Vec<(String, Option<String>)>> {
    let switches =
        [(Kind::Gpu, args.gpu), (Kind::Metal, args.metal), (Kind::Ane, args.ane), (Kind::Mps, args.mps)];
    let mut changes: Vec<_> = switches
        .into_iter()
        .filter_map(|(kind, switch)| {
            let value = matches!(switch?, Switch::On).to_string();
            Some((format!("devices.{kind}"), Some(value)))
        })
        .collect();
    if let Some(python) = &args.torch_python {
        changes.push(("mps.torch_python".to_owned(), torch_python(python)?));
    }
    Ok(changes)
}

/// The value for a path as the user gave it: made absolute, and no link is followed, because a virtual environment's Python
/// is one. `None` for an empty one.
fn torch_python(python: &str) -> anyhow::Result<Option<String>> {
    if python.is_empty() {
        return Ok(None);
    }
    let path = std::path::absolute(python).with_context(|| format!("no usable path: {python:?}"))?;
    let is_program = std::fs::metadata(&path).is_ok_and(|found| {
        found.is_file() && std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o111 != 0
    });
    if !is_program {
        bail!(
            "{} is no program: give the path of a Python interpreter that has torch, as `which python3` prints it",
            path.display()
        );
    }
    Ok(Some(Value::from(path.display().to_string()).to_string()))
}

/// Applies the changes to the file as one, then tells a running daemon.
fn change(path: &Path, changes: &[(String, Option<String>)]) -> anyhow::Result<()> {
    let old = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read configuration {}", path.display()));
        }
    };
    let before = Config::parse(&old, path)?;
    let new = edit(&old, changes)?;
    let after = Config::parse(&new, path).context("the change is refused and the file is as it was")?;
    if new != old {
        write_atomically(path, &new)?;
    }
    if before != after {
        match control::ask(&after.daemon.control_socket(), &Request::Reload) {
            Ok(Reply::Done) => output::line("the running daemon has taken the change")?,
            Ok(Reply::Failed { reason }) => {
                bail!("the file is changed, but the running daemon refused it: {reason}")
            }
            Ok(_) => bail!(
                "the file is changed, but the running daemon gave an answer of another version: restart it"
            ),
            Err(control::ControlError::NotRunning { .. }) => {
                output::line("no daemon is running: the change holds from the next `lighter start`")?;
            }
            Err(error) => {
                return Err(error).context("the file is changed, but the running daemon could not be told");
            }
        }
    }
    Ok(())
}

/// The text of the file after the changes. Pure.
fn edit(text: &str, changes: &[(String, Option<String>)]) -> anyhow::Result<String> {
    let mut document: DocumentMut = text.parse().context("the configuration file is no valid TOML")?;
    for (key, value) in changes {
        let mut parts: Vec<&str> = key.split('.').collect();
        let Some(last) = parts.pop().filter(|last| !last.is_empty()) else { bail!("empty key") };
        let mut table = document.as_table_mut();
        for part in parts {
            let item = table.entry(part).or_insert_with(|| Item::Table(Table::new()));
            table = item
                .as_table_mut()
                .with_context(|| format!("{part:?} in key {key:?} is a value, no section"))?;
        }
        match value {
            None => {
                table.remove(last);
            }
            Some(value) => {
                let parsed = value.parse::<Value>().unwrap_or_else(|_| Value::from(value.as_str()));
                table.insert(last, Item::Value(parsed));
            }
        }
    }
    Ok(document.to_string())
}

fn write_atomically(path: &Path, text: &str) -> anyhow::Result<()> {
    let dir = path.parent().with_context(|| format!("{} has no parent folder", path.display()))?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let named = || format!("cannot write configuration {}", path.display());
    let temporary = path.with_extension("toml.new");
    let mut file = std::fs::File::create(&temporary).with_context(named)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(named)?;
    std::fs::rename(&temporary, path).with_context(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &str) -> (String, Option<String>) {
        (key.to_owned(), Some(value.to_owned()))
    }

    #[test]
    fn comments_and_order_survive_a_change() {
        let text = "# mine\n[metal]\nengine = \"CPU\" # why\n";
        let new = edit(text, &[set("devices.gpu", "false"), set("metal.engine", "Vulkan0")]).unwrap();
        assert!(new.starts_with("# mine\n[metal]\nengine = \"Vulkan0\""), "{new}");
        assert!(new.contains("[devices]\ngpu = false\n"), "{new}");
    }

    #[test]
    fn an_unset_key_leaves_the_file() {
        let new = edit("[mps]\ntorch_python = \"/x\"\n", &[("mps.torch_python".into(), None)]).unwrap();
        assert_eq!(new, "[mps]\n");
    }

    #[test]
    fn a_key_below_a_value_is_refused() {
        assert!(
            edit("devices = 1\n", &[set("devices.gpu", "true")]).unwrap_err().to_string().contains("devices")
        );
    }
}
