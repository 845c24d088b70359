// SPDX-License-Identifier: MIT OR Apache-2.0
//! One GET over a unix socket, by HTTP/1.0 so that the answer ends with the connection and is never chunked.
//!
//! Refuses answers over [`MAX_ANSWER_BYTES`], cut ones, and everything after the deadline.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};

const MAX_ANSWER_BYTES: usize = 4 << 20;
const MAX_HEADERS: usize = 64;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    /// The socket failed. The cause is printed: a refusal's log line is all that a user sees.
    #[error("{path}: {source}")]
    Socket { path: PathBuf, source: io::Error },
    /// The time was up.
    #[error("{path}: no answer within the time limit")]
    Late { path: PathBuf },
    /// What came is no answer to use.
    #[error("{path}: {cause}")]
    Answer { path: PathBuf, cause: &'static str },
}

/// Status and body of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Response<'a> {
    pub(super) status: u16,
    pub(super) body: &'a [u8],
}

/// Sends the request and gives the whole answer, unparsed.
pub(super) fn get(socket: &Path, target: &str, deadline: Instant) -> Result<Vec<u8>, HttpError> {
    exchange(socket, target, deadline).map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => HttpError::Late { path: socket.into() },
        _ => HttpError::Socket { path: socket.into(), source },
    })
}

fn exchange(path: &Path, target: &str, deadline: Instant) -> io::Result<Vec<u8>> {
    let left = || -> io::Result<Duration> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // A full backlog makes connect wait; the kernel bounds it by the send timeout.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left()?))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let mut stream = UnixStream::from(socket);
    stream.write_all(format!("GET {target} HTTP/1.0\r\nHost: engine\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    let mut part = [0; 16 << 10];
    loop {
        stream.set_read_timeout(Some(left()?))?;
        let got = match stream.read(&mut part) {
            Ok(0) => return Ok(answer),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if answer.len().saturating_add(got) > MAX_ANSWER_BYTES {
            return Err(io::Error::other(format!("the answer is larger than {MAX_ANSWER_BYTES} bytes")));
        }
        answer.extend_from_slice(part.get(..got).unwrap_or_default());
    }
}

/// Takes an answer apart.
pub(super) fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Response<'a>, HttpError> {
    let bad = |cause| HttpError::Answer { path: path.into(), cause };
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let head = match response.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return Err(bad("the answer ends within its headers")),
        Err(_) => return Err(bad("the answer is not HTTP")),
    };
    let status = response.code.ok_or_else(|| bad("the answer has no status"))?;
    let body = bytes.get(head..).unwrap_or_default();
    let header = |name: &str| response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    if header("transfer-encoding").is_some() {
        return Err(bad("the answer is encoded though it was asked for by HTTP/1.0"));
    }
    if let Some(length) = header("content-length") {
        let length =
            std::str::from_utf8(length.value).ok().and_then(|text| text.trim().parse::<usize>().ok());
        if length != Some(body.len()) {
            return Err(bad("the answer is shorter or longer than it says"));
        }
    }
    Ok(Response { status, body })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Result<(u16, String), String> {
        parse(Path::new("/s"), text.as_bytes())
            .map(|response| (response.status, String::from_utf8_lossy(response.body).into_owned()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn whole_answers_are_taken_and_others_named() {
        assert_eq!(parsed("HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}"), Ok((200, "{}".into())));
        assert_eq!(parsed("HTTP/1.1 404 Not Found\r\n\r\n"), Ok((404, String::new())));
        for (text, says) in [
            ("HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n{}", "shorter"),
            ("HTTP/1.0 200 OK\r\nContent-Length: x\r\n\r\n{}", "shorter"),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "encoded"),
            ("HTTP/1.0 200 OK\r\nConte", "ends within"),
            ("\u{1}\u{2}\u{3}", "not HTTP"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(says) && error.contains("/s"), "{error}");
        }
    }

    #[test]
    fn an_engine_that_says_nothing_costs_no_more_than_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let error = get(&path, "/x", Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, HttpError::Late { .. }), "{error}");
        drop(listener);
        let error = get(&path, "/x", Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, HttpError::Socket { .. }), "{error}");
    }

    proptest! {
        #[test]
        fn no_answer_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(Path::new("/s"), &bytes);
            let mut whole = b"HTTP/1.0 200 OK\r\n".to_vec();
            whole.extend(bytes);
            let _ = parse(Path::new("/s"), &whole);
        }
    }
}
