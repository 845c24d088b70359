// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device's endpoint as its variable says it: `A.B.C.D:PORT`. Pure; refuses everything else, names included.

/// An IPv4 address and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// The address, in the order in which it is written.
    pub address: [u8; 4],
    /// The port.
    pub port: u16,
}

impl Endpoint {
    /// Parses the text; `None` for anything but four numbers, a colon and a port that is not 0.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let colon = text.iter().position(|byte| *byte == b':')?;
        let (address, port) = text.split_at_checked(colon)?;
        let mut numbers = address.split(|byte| *byte == b'.');
        let mut part = || u8::try_from(number(numbers.next()?)?).ok();
        let address = [part()?, part()?, part()?, part()?];
        let port = number(port.get(1..)?).filter(|port| *port > 0)?;
        numbers.next().is_none().then_some(Self { address, port })
    }
}

/// A decimal number of one to five digits that fits 16 bits.
fn number(digits: &[u8]) -> Option<u16> {
    if digits.is_empty() || digits.len() > 5 {
        return None;
    }
    digits.iter().try_fold(0_u16, |value, digit| {
        let digit = digit.is_ascii_digit().then(|| digit - b'0')?;
        value.checked_mul(10)?.checked_add(u16::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_four_numbers_and_a_port() {
        let parsed = Endpoint::parse(b"127.0.0.1:50052");
        assert_eq!(parsed, Some(Endpoint { address: [127, 0, 0, 1], port: 50052 }));
        assert!(Endpoint::parse(b"255.0.0.1:65535").is_some());
    }

    #[test]
    fn anything_else_is_none() {
        for text in [
            "",
            ":",
            "127.0.0.1",
            "127.0.0.1:",
            "127.0.0.1:0",
            "127.0.0.1:65536",
            "127.0.0.1:123456",
            "127.0.0:1",
            "127.0.0.1.2:1",
            "256.0.0.1:1",
            "127..0.1:1",
            "localhost:1",
            "127.0.0.1:+1",
            " 127.0.0.1:1",
            "127.0.0.1:1:2",
            "[::1]:1",
        ] {
            assert_eq!(Endpoint::parse(text.as_bytes()), None, "{text:?}");
        }
    }
}
