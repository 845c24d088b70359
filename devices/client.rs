// SPDX-License-Identifier: MIT OR Apache-2.0
//! The folder that containers get to see: what lies in it, and how it is laid out.
//!
//! ```text
//! CLIENT_DIR/bin/lighter-env    mounted at /usr/lib/lighter/bin by every device
//! CLIENT_DIR/<device>/env       mounted at /usr/lib/lighter/<device> by that device only
//! CLIENT_DIR/<device>/…         what else the device's programs need there
//! ```
//!
//! A device's folder in a container says that the container was given the device, so `lighter-env` needs no
//! other knowledge. Two mounts side by side, not one in another: a runtime could not create the inner mount
//! point on a read-only outer mount. Called by the daemon at its start; refuses a file name that leaves the folder.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

/// Where the parts of the client folder appear in a container.
pub const CONTAINER_DIR: &str = "/usr/lib/lighter";
/// The part that every device mounts.
pub const BIN: &str = "bin";

const LIGHTER_ENV: &str = include_str!("assets/lighter-env");

/// One file below the client folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFile {
    /// Path below the folder.
    pub path: PathBuf,
    /// Content.
    pub content: Content,
    /// Whether it is a program.
    pub executable: bool,
}

/// What is in a client file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// These bytes.
    Bytes(Vec<u8>),
    /// What is in this file of the host.
    CopyOf(PathBuf),
}

/// Why the client folder could not be laid out.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The path is not below the folder.
    #[error("client file {} does not lie below the client folder", path.display())]
    Outside {
        /// The path.
        path: PathBuf,
    },
    /// The file to copy could not be read.
    #[error("{} could not be read to copy it into the client folder", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A folder or file could not be written.
    #[error("client file {} could not be written", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// The file with a device's variables, as `lighter-env` reads it.
#[must_use]
pub fn env_file(device: &str, variables: &[(String, String)]) -> ClientFile {
    let lines: Vec<String> = variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    ClientFile {
        path: Path::new(device).join("env"),
        content: Content::Bytes(lines.concat().into_bytes()),
        executable: false,
    }
}

/// The files that belong to no one device.
#[must_use]
pub fn common_files() -> Vec<ClientFile> {
    vec![ClientFile {
        path: Path::new(BIN).join("lighter-env"),
        content: Content::Bytes(LIGHTER_ENV.as_bytes().to_vec()),
        executable: true,
    }]
}

/// Writes [`common_files`] and `files` below `folder`: folders 0755, programs 0755, others 0644, each file
/// replaced in one step and left alone when it is the same already. Nothing else is removed: running
/// containers have the folders mounted.
///
/// # Errors
/// When a path leaves the folder, or a file cannot be read or written.
pub fn lay_out(folder: &Path, files: &[ClientFile]) -> Result<(), ClientError> {
    make_folder(folder)?;
    for file in common_files().iter().chain(files) {
        if file.path.components().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(ClientError::Outside { path: file.path.clone() });
        }
        let path = folder.join(&file.path);
        let mut parents: Vec<&Path> =
            path.ancestors().skip(1).take_while(|parent| parent.starts_with(folder)).collect();
        parents.reverse();
        for parent in parents {
            make_folder(parent)?;
        }
        let mode = if file.executable { 0o755 } else { 0o644 };
        let copied;
        let content = match &file.content {
            Content::Bytes(bytes) => bytes,
            Content::CopyOf(from) => {
                copied = fs::read(from).map_err(|source| ClientError::Read { path: from.clone(), source })?;
                &copied
            }
        };
        place(&path, content, mode).map_err(|source| ClientError::Write { path, source })?;
    }
    Ok(())
}

fn make_folder(folder: &Path) -> Result<(), ClientError> {
    let result = fs::create_dir_all(folder).and_then(|()| {
        // Users of remapped ids must reach it, whatever the daemon's umask is.
        fs::set_permissions(folder, Permissions::from_mode(0o755))
    });
    result.map_err(|source| ClientError::Write { path: folder.to_owned(), source })
}

fn place(path: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    let is_same = fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o7777 == mode)
        && fs::read(path).is_ok_and(|found| found == content);
    if is_same {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(content)?;
    file.as_file().set_permissions(Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Another test's child may hold the fresh file open for writing until it has executed its own program.
    fn output_of(command: &mut Command) -> std::process::Output {
        loop {
            match command.output() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                    std::thread::yield_now()
                }
                result => return result.unwrap(),
            }
        }
    }

    fn run_env(folder: &Path, set: &[(&str, &str)]) -> String {
        let mut command = Command::new(folder.join("bin/lighter-env"));
        command.args(["sh", "-c", "echo \"$LIGHTER_METAL|$LLAMA_ARG_RPC|$ODD\""]);
        command.env_remove("LIGHTER_METAL").env_remove("LLAMA_ARG_RPC").env_remove("ODD");
        command.envs(set.iter().copied());
        let output = output_of(&mut command);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_wrapper_sets_what_the_given_devices_say_and_keeps_what_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let metal =
            env_file("metal", &variables(&[("LIGHTER_METAL", "127.0.0.1:1"), ("LLAMA_ARG_RPC", "x y")]));
        let odd =
            env_file("odd", &variables(&[("ODD", "$(echo run) 'q' \"d\" = *"), ("B;AD", "1"), ("", "")]));
        lay_out(folder.path(), &[metal, odd]).unwrap();
        assert_eq!(run_env(folder.path(), &[]), "127.0.0.1:1|x y|$(echo run) 'q' \"d\" = *\n");
        assert_eq!(run_env(folder.path(), &[("LLAMA_ARG_RPC", "mine")]).split('|').nth(1), Some("mine"));
        // A container without the device has no such folder.
        fs::remove_dir_all(folder.path().join("metal")).unwrap();
        assert_eq!(run_env(folder.path(), &[]).split('|').next(), Some(""));
    }

    #[test]
    fn the_wrapper_without_a_command_shows_its_usage() {
        let folder = tempfile::tempdir().unwrap();
        lay_out(folder.path(), &[]).unwrap();
        let output = output_of(&mut Command::new(folder.path().join("bin/lighter-env")));
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
    }

    #[test]
    fn laying_out_again_changes_no_file_and_repairs_a_changed_one() {
        let folder = tempfile::tempdir().unwrap();
        lay_out(folder.path(), &[]).unwrap();
        let path = folder.path().join("bin/lighter-env");
        let first = fs::metadata(&path).unwrap().modified().unwrap();
        lay_out(folder.path(), &[]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), first);
        fs::write(&path, "broken").unwrap();
        lay_out(folder.path(), &[]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIGHTER_ENV.as_bytes());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn a_path_that_leaves_the_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["../x", "/etc/x", "a/../../x"] {
            let file =
                ClientFile { path: path.into(), content: Content::Bytes(Vec::new()), executable: false };
            assert!(matches!(lay_out(folder.path(), &[file]), Err(ClientError::Outside { .. })), "{path}");
        }
    }

    #[test]
    fn a_copy_follows_its_source_and_a_missing_source_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        let copy = ClientFile {
            path: "metal/copy".into(),
            content: Content::CopyOf(source.clone()),
            executable: false,
        };
        let client = folder.path().join("client");
        let error = lay_out(&client, std::slice::from_ref(&copy)).unwrap_err();
        assert!(error.to_string().contains("source"), "{error}");
        for text in ["one", "two"] {
            fs::write(&source, text).unwrap();
            lay_out(&client, std::slice::from_ref(&copy)).unwrap();
            assert_eq!(fs::read_to_string(client.join("metal/copy")).unwrap(), text);
        }
    }
}
