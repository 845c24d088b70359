// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that the container's bundle really calls this hook for this device.
//!
//! A caller that may speak to the agent could ask for a grant that nobody's CDI request stands behind; the bundle's
//! `config.json` is what the runtime works from. It proves nothing against root, who can write one.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::device::DeviceName;
use crate::proc::read_capped;

const MAX_CONFIG_BYTES: u64 = 8 << 20;

/// Why a bundle does not stand for the device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BundleError {
    /// The file cannot be read.
    #[error("the bundle's {path} cannot be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause; printed, since the hook's caller sees one line only.
        source: io::Error,
    },
    /// It is no OCI configuration. What it holds is not repeated: it may be somebody else's file.
    #[error("the bundle's {path} is no OCI configuration: error in line {line}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where.
        line: usize,
    },
    /// It has no such hook.
    #[error("the bundle's {path} has no createRuntime hook `{hook} grant … {device}`")]
    NoHook {
        /// The file.
        path: PathBuf,
        /// The hook's program.
        hook: PathBuf,
        /// The device asked for.
        device: DeviceName,
    },
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    hooks: Option<Hooks>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Hooks {
    #[serde(default)]
    create_runtime: Option<Vec<Hook>>,
}

#[derive(Deserialize)]
struct Hook {
    path: PathBuf,
    #[serde(default)]
    args: Option<Vec<String>>,
}

/// Checks a bundle directory.
///
/// # Errors
/// When its configuration cannot be read or does not call `hook` with `grant` and the device.
pub(crate) fn check(bundle: &Path, hook: &Path, device: &DeviceName) -> Result<(), BundleError> {
    let path = bundle.join("config.json");
    if !bundle.is_absolute() {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "the bundle's path is not absolute");
        return Err(BundleError::Read { path, source });
    }
    let bytes = match read_capped(&path, MAX_CONFIG_BYTES) {
        Ok(bytes) => bytes,
        Err(source) => return Err(BundleError::Read { path, source }),
    };
    match calls(&bytes, hook, device) {
        Ok(true) => Ok(()),
        Ok(false) => Err(BundleError::NoHook { path, hook: hook.into(), device: device.clone() }),
        Err(error) => Err(BundleError::Parse { path, line: error.line() }),
    }
}

/// Whether an OCI configuration calls `hook` with `grant` and the device at createRuntime.
pub(crate) fn calls(config: &[u8], hook: &Path, device: &DeviceName) -> Result<bool, serde_json::Error> {
    let config: Config = serde_json::from_slice(config)?;
    let hooks = config.hooks.and_then(|hooks| hooks.create_runtime).unwrap_or_default();
    let device = device.to_string();
    Ok(hooks.iter().any(|candidate| {
        // The first argument is the program's own name.
        let args = candidate.args.as_deref().unwrap_or_default().get(1..).unwrap_or_default();
        candidate.path == hook && args.first().is_some_and(|arg| arg == "grant") && args.contains(&device)
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONFIG: &str = r#"{"ociVersion":"1.2.0","process":{"args":["sh"]},"hooks":{"prestart":[{"path":"/x"}],
        "createRuntime":[{"path":"/bin/other"},
        {"path":"/usr/bin/lighter-hook","args":["lighter-hook","grant","lighter.sh/metal=all"],"timeout":10}]}}"#;

    fn device(text: &str) -> DeviceName {
        text.parse().unwrap()
    }

    #[test]
    fn only_this_hook_with_this_device_counts() {
        let hook = Path::new("/usr/bin/lighter-hook");
        let metal = device("lighter.sh/metal=all");
        assert!(calls(CONFIG.as_bytes(), hook, &metal).unwrap());
        assert!(!calls(CONFIG.as_bytes(), hook, &device("lighter.sh/metal=cpu")).unwrap());
        assert!(!calls(CONFIG.as_bytes(), hook, &device("lighter.sh/gpu=all")).unwrap());
        assert!(!calls(CONFIG.as_bytes(), Path::new("/bin/other"), &metal).unwrap());
        assert!(!calls(CONFIG.replace("grant", "release").as_bytes(), hook, &metal).unwrap());
        assert!(!calls(CONFIG.replace("createRuntime", "poststop").as_bytes(), hook, &metal).unwrap());
        assert!(!calls(br#"{"hooks":null}"#, hook, &metal).unwrap());
    }

    #[test]
    fn a_bundle_that_is_not_there_or_no_file_is_an_error_with_its_path() {
        let (hook, metal) = (Path::new("/h"), device("lighter.sh/metal=all"));
        let directory = tempfile::tempdir().unwrap();
        let error = check(directory.path(), hook, &metal).unwrap_err().to_string();
        assert!(error.contains(&directory.path().display().to_string()), "{error}");
        std::fs::write(directory.path().join("config.json"), "{\"hooks\":\n\"secret\"}").unwrap();
        let error = check(directory.path(), hook, &metal).unwrap_err().to_string();
        assert!(error.contains("line 2") && !error.contains("secret"), "{error}");
        assert!(matches!(check(Path::new("relative"), hook, &metal), Err(BundleError::Read { .. })));
    }

    proptest! {
        #[test]
        fn no_config_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = calls(&bytes, Path::new("/h"), &device("lighter.sh/metal=all"));
        }
    }
}
