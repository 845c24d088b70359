// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a user can set: options of the session (`ep.lighterane.NAME`), and the variables that lighter puts into the
//! container. Pure. Refuses values that it does not know, by name.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lighter_frames::{MAX_UNITS_BYTES, Transport};

use crate::sys::socket::MAX_PATH_BYTES;
use crate::work::MIN_WORK;

/// Where the device's service listens in every container that has the device.
const SOCKET: &str = "/run/lighter/ane/socket";

/// The settings of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// `socket`, else `LIGHTER_ANE`, else the fixed place: where the device's service listens.
    pub(crate) socket: String,
    /// `transport`: `shm` or `stream`; `auto` asks for shared memory and takes what the host gives.
    pub(crate) transport: Transport,
    /// `units`, else `LIGHTER_ANE_UNITS`: which of the host's units the models are pinned to; the host reads it.
    pub(crate) units: String,
    /// `min_work`: least work of a group of nodes that is sent to the host, in multiplications.
    pub(crate) min_work: u64,
    /// `report`: says at the end of a session what ran where.
    pub(crate) is_reported: bool,
}

impl Settings {
    /// Reads the settings: `option` gives the text of an option by its name, `environment` is as `/proc` has it.
    pub(crate) fn read(option: impl Fn(&str) -> Option<Vec<u8>>, environment: &[u8]) -> Result<Self, String> {
        let option = |name: &'static str| -> Result<Option<String>, String> {
            let Some(bytes) = option(name) else { return Ok(None) };
            String::from_utf8(bytes).map(Some).map_err(|_| format!("option {name} is no UTF-8"))
        };
        let socket = option("socket")?
            .or_else(|| variable(environment, "LIGHTER_ANE"))
            .unwrap_or_else(|| SOCKET.to_owned());
        if !socket.starts_with('/') || socket.len() > MAX_PATH_BYTES {
            return Err(format!(
                "socket is {socket:?}: it must be an absolute path of at most {MAX_PATH_BYTES} bytes"
            ));
        }
        let transport = match option("transport")?.as_deref() {
            None | Some("auto" | "shm") => Transport::SharedMemory,
            Some("stream") => Transport::Stream,
            Some(other) => {
                return Err(format!("option transport is {other:?}: it must be auto, shm or stream"));
            }
        };
        let units =
            option("units")?.or_else(|| variable(environment, "LIGHTER_ANE_UNITS")).unwrap_or_default();
        if units.len() > MAX_UNITS_BYTES {
            return Err(format!("units is longer than {MAX_UNITS_BYTES} bytes"));
        }
        let min_work = match option("min_work")? {
            None => MIN_WORK,
            Some(text) => {
                text.parse().map_err(|_| format!("option min_work is {text:?}: it must be a number"))?
            }
        };
        let is_reported = match option("report")?.as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(format!("option report is {other:?}: it must be 0 or 1")),
        };
        Ok(Self { socket, transport, units, min_work, is_reported })
    }
}

/// A variable of the environment, unless it is empty or no text.
fn variable(environment: &[u8], name: &str) -> Option<String> {
    let value = environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    core::str::from_utf8(value).ok().filter(|value| !value.is_empty()).map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENVIRONMENT: &[u8] = b"A=1\0LIGHTER_ANE=/run/x\0LIGHTER_ANE_UNITS=gpu\0";

    fn with(options: &[(&str, &str)], environment: &[u8]) -> Result<Settings, String> {
        let option = |name: &str| {
            options.iter().find(|(option, _)| *option == name).map(|(_, value)| value.as_bytes().to_vec())
        };
        Settings::read(option, environment)
    }

    #[test]
    fn options_come_before_variables_before_what_is_fixed() {
        let fixed = with(&[], b"").unwrap();
        assert_eq!((fixed.socket.as_str(), fixed.units.as_str()), (SOCKET, ""));
        assert_eq!(
            (fixed.transport, fixed.min_work, fixed.is_reported),
            (Transport::SharedMemory, MIN_WORK, false)
        );
        let variables = with(&[], ENVIRONMENT).unwrap();
        assert_eq!((variables.socket.as_str(), variables.units.as_str()), ("/run/x", "gpu"));
        let all =
            [("socket", "/y"), ("units", "ane"), ("transport", "stream"), ("min_work", "0"), ("report", "1")];
        let options = with(&all, ENVIRONMENT).unwrap();
        assert_eq!((options.socket.as_str(), options.units.as_str()), ("/y", "ane"));
        assert_eq!((options.transport, options.min_work, options.is_reported), (Transport::Stream, 0, true));
    }

    #[test]
    fn an_empty_variable_is_none() {
        assert_eq!(with(&[], b"LIGHTER_ANE=\0").unwrap().socket, SOCKET);
        assert_eq!(with(&[], b"XLIGHTER_ANE=/x\0").unwrap().socket, SOCKET);
    }

    #[test]
    fn a_value_that_is_not_known_is_refused_by_name() {
        for (name, value) in [
            ("socket", "relative"),
            ("transport", "tcp"),
            ("min_work", "-1"),
            ("report", "yes"),
            ("units", &"x".repeat(65)),
        ] {
            let error = with(&[(name, value)], b"").unwrap_err();
            assert!(error.contains(name), "{error}");
        }
        assert!(with(&[("socket", &format!("/{}", "x".repeat(107)))], b"").is_err());
    }
}
