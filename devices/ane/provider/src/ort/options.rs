// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading a session's options.
#![allow(unsafe_code)]

use alloc::ffi::CString;
use alloc::format;
use alloc::vec::Vec;

use ort_sys::OrtSessionOptions;

use super::Ort;

/// The value of `ep.lighterane.NAME`, the prefix under which the runtime keeps this provider's options.
///
/// # Safety
/// Options that the runtime has passed in, during its call.
pub(crate) unsafe fn option(ort: Ort, options: *const OrtSessionOptions, name: &str) -> Option<Vec<u8>> {
    let key = CString::new(format!("ep.lighterane.{name}")).ok()?;
    let (mut is_set, mut bytes) = (0, 0);
    // SAFETY: the caller's promise; a key that lives through the calls, and places for the answers, of that length.
    unsafe {
        ort.check((ort.api().HasSessionConfigEntry)(options, key.as_ptr(), &raw mut is_set)).ok()?;
        if is_set == 0 {
            return None;
        }
        let get = ort.api().GetSessionConfigEntry;
        ort.check(get(options, key.as_ptr(), core::ptr::null_mut(), &raw mut bytes)).ok()?;
        let mut value = alloc::vec![0_u8; bytes];
        ort.check(get(options, key.as_ptr(), value.as_mut_ptr().cast(), &raw mut bytes)).ok()?;
        value.truncate(bytes);
        while value.pop_if(|last| *last == 0).is_some() {}
        Some(value)
    }
}
