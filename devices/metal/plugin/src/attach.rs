// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides what the plug-in adds to this program, and adds it. Called once, by ggml.
#![allow(clippy::result_large_err, reason = "without allocation a text has no other place")]

use core::ptr::NonNull;

use crate::endpoint::Endpoint;
use crate::foreign::{self, Backend, Client, Ggml};
use crate::line::Line;

/// Names the endpoint; the container's environment, or `lighter-env`, sets it.
const VARIABLE: &core::ffi::CStr = c"LIGHTER_METAL";

/// The backend that ggml is to register, or a line for the user.
pub(crate) fn attach() -> Result<NonNull<Backend>, Line> {
    let Some(ggml) = Ggml::of_this_program() else {
        return Err(Line::message(&[b"this program's ggml cannot be found, so it does not see the device"]));
    };
    let own = ggml.backend(c"RPC");
    if foreign::is_llama() {
        // It connects by itself, given a client. Its own, which is registered already, is the one answer to ggml
        // that changes nothing and prints no warning.
        return own.map_or_else(|| client_for_llama(&ggml), Ok);
    }
    let Some(text) = foreign::variable(VARIABLE) else {
        return Err(Line::message(&[
            b"LIGHTER_METAL is not set, so this program does not see the device: start it with /usr/lib/lighter/bin/lighter-env",
        ]));
    };
    let Some(endpoint) = Endpoint::parse(text.to_bytes()) else {
        return Err(Line::message(&[b"LIGHTER_METAL=", text.to_bytes(), b" is no ADDRESS:PORT"]));
    };
    let add_server = match own {
        Some(own) => ggml.add_server_of(own).ok_or_else(|| {
            Line::message(&[
                b"ggml ",
                ggml.version().to_bytes(),
                b" has an RPC client of another kind, so this program does not see the device",
            ])
        })?,
        None => client_beside(&ggml)?.add_server,
    };
    // The client ends the whole program when a server closes the connection at once, as the gate does.
    if !foreign::answers(endpoint) {
        return Err(Line::message(&[
            b"the device's endpoint ",
            text.to_bytes(),
            b" does not answer, so this program computes without it; `lighter status` on the host may say why",
        ]));
    }
    foreign::add_server(add_server, text).ok_or_else(|| {
        Line::message(&[
            b"ggml's RPC client finds no device at ",
            text.to_bytes(),
            b", so this program computes without it",
        ])
    })
}

/// A client without a server, which llama.cpp gets from its option or variable. Without one it takes the variable
/// for an error and ends, below the line that says why.
fn client_for_llama(ggml: &Ggml) -> Result<NonNull<Backend>, Line> {
    let client = client_beside(ggml)?;
    client.backend().ok_or_else(|| Line::message(&[b"ggml's RPC client is empty"]))
}

/// The RPC client beside this plug-in that belongs to the program's ggml.
fn client_beside(ggml: &Ggml) -> Result<Client, Line> {
    let version = ggml.version().to_bytes();
    let not_seen = b", so this program does not see the device";
    let path = Line::of(&[foreign::own_folder(), b"/libggml-rpc-", version, b".so"]);
    let Some(c_path) = path.as_c() else {
        return Err(Line::message(&[b"the path of ggml's RPC client is too long", not_seen]));
    };
    if !foreign::exists(c_path) {
        return Err(Line::message(&[
            b"this image's ggml ",
            version,
            b" has no RPC client and the host's ggml is of another version (no ",
            path.bytes(),
            b")",
            not_seen,
        ]));
    }
    Client::load(c_path).map_err(|reason| {
        Line::message(&[b"ggml's RPC client does not fit this image (", reason.to_bytes(), b")", not_seen])
    })
}
