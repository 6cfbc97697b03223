//! How a document looks in its file: `format` first, then its checksum.
//!
//! A JSON file with a changed byte is usually still JSON, and a layer list that lost an entry still
//! parses. So every document carries the SHA-256 of its own file, computed with the digits of the
//! checksum replaced by zeros. A document of format 5 or later whose checksum is missing or wrong is
//! damaged; older formats have none.
//!
//! Nothing of a later format is written over: a daemon that was downgraded must not destroy what it
//! does not understand.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use crate::model::FORMAT;
use crate::store::{Result, StoreError, io_error};

/// Documents have a checksum from this format on.
const CHECKED_SINCE: u32 = 5;

/// How many digits a checksum has.
pub(in crate::store) const CHECKSUM_DIGITS: usize = 64;

/// The first two members; anything else is ignored.
#[derive(serde::Deserialize)]
struct Probe {
    format: u32,
    #[serde(default)]
    checksum: Option<String>,
}

/// Writes a document as the bytes of its file. Its format becomes [`FORMAT`]: whatever version it was
/// read from, this is how it is written now.
pub(in crate::store) fn to_json<T: Serialize>(value: &T, place: &Path) -> Result<Vec<u8>> {
    let refused = |reason: String| StoreError::Damaged {
        path: place.to_owned(),
        reason: format!("it cannot be written as JSON: {reason}"),
    };
    let text = serde_json::to_string_pretty(value).map_err(|error| refused(error.to_string()))?;
    let rest = text
        .strip_prefix("{\n  \"format\": ")
        .map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()))
        .ok_or_else(|| refused("it does not begin with its format".to_owned()))?;
    let head = head(FORMAT);
    let mut bytes = format!("{head}{}\"{rest}\n", "0".repeat(CHECKSUM_DIGITS)).into_bytes();
    let checksum = hex::encode(sha256(&bytes));
    bytes[head.len()..head.len() + CHECKSUM_DIGITS].copy_from_slice(checksum.as_bytes());
    Ok(bytes)
}

/// Reads a document, format first: one of a later version may look damaged to this one.
pub(in crate::store) fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    let damaged = |reason: String| StoreError::Damaged { path: path.to_owned(), reason };
    let probe = probe(path, bytes)?;
    // One whose format number was damaged still has its checksum.
    if probe.format >= CHECKED_SINCE || probe.checksum.is_some() {
        check(probe.format, bytes).map_err(|reason| damaged(reason.to_owned()))?;
    }
    serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))
}

/// Reads no more than the format of a document, and refuses a later one. It need not have a checksum.
pub(in crate::store) fn check_format(path: &Path, bytes: &[u8]) -> Result<u32> {
    probe(path, bytes).map(|probe| probe.format)
}

fn probe(path: &Path, bytes: &[u8]) -> Result<Probe> {
    let damaged = |reason: String| StoreError::Damaged { path: path.to_owned(), reason };
    if bytes.is_empty() {
        return Err(damaged("it is empty".to_owned()));
    }
    let probe: Probe = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    if probe.format > FORMAT {
        let path = path.to_owned();
        return Err(StoreError::TooNew { path, found: probe.format, known: FORMAT });
    }
    Ok(probe)
}

/// Everything before the digits of the checksum.
fn head(format: u32) -> String {
    format!("{{\n  \"format\": {format},\n  \"checksum\": \"")
}

fn check(format: u32, bytes: &[u8]) -> Result<(), &'static str> {
    let head = head(format);
    if !bytes.starts_with(head.as_bytes()) || bytes.len() < head.len() + CHECKSUM_DIGITS {
        return Err("its checksum is missing");
    }
    let digits = head.len()..head.len() + CHECKSUM_DIGITS;
    let mut blank = bytes.to_vec();
    blank[digits.clone()].fill(b'0');
    if hex::encode(sha256(&blank)).as_bytes() == &bytes[digits] {
        Ok(())
    } else {
        Err("its checksum is wrong: it was changed after it was written")
    }
}

/// Where the checksum of a file is that is not read as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum FileChecksum {
    /// As in all documents.
    InDocument,
    /// In the first line, which [`line_head`] begins.
    InFirstLine,
}

/// The first line of a file of lines, as far as the digits of its checksum.
pub(in crate::store) fn line_head(format: u32) -> String {
    format!("{{\"format\":{format},\"checksum\":\"")
}

/// Checks format and checksum of a file that may be too large to be held in memory.
pub(in crate::store) fn check_file(path: &Path, layout: FileChecksum) -> Result<()> {
    let damaged =
        |reason: &str| StoreError::Damaged { path: path.to_owned(), reason: reason.to_owned() };
    let mut file = File::open(path).map_err(io_error("open", path))?;
    let mut buffer = vec![0; 64 << 10];
    let mut read = |buffer: &mut [u8]| file.read(buffer).map_err(io_error("read", path));
    let mut length = read(&mut buffer)?;
    if length == 0 {
        return Err(damaged("it is empty"));
    }
    let format = format_in(&buffer[..length.min(64)]);
    let format = format.ok_or_else(|| damaged("it does not begin with its format"))?;
    if format > FORMAT {
        return Err(StoreError::TooNew { path: path.to_owned(), found: format, known: FORMAT });
    }
    let head = match layout {
        FileChecksum::InDocument => head(format),
        FileChecksum::InFirstLine => line_head(format),
    };
    let digits = head.len()..head.len() + CHECKSUM_DIGITS;
    if !buffer.starts_with(head.as_bytes()) || length < digits.end {
        if format < CHECKED_SINCE {
            return Ok(());
        }
        return Err(damaged("its checksum is missing"));
    }
    let checksum = buffer[digits.clone()].to_vec();
    buffer[digits].fill(b'0');
    let mut hash = Sha256::new();
    while length > 0 {
        hash.update(&buffer[..length]);
        length = read(&mut buffer)?;
    }
    if hex::encode(hash.finalize()).as_bytes() == checksum {
        Ok(())
    } else {
        Err(damaged("its checksum is wrong: it was changed after it was written"))
    }
}

pub(in crate::store) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Returns an error when the file is a document of a later format.
pub(in crate::store) fn refuse_later(path: &Path) -> Result<()> {
    let mut begin = [0u8; 64];
    let read = match File::open(path) {
        Ok(mut file) => file.read(&mut begin),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
    };
    let Ok(length) = read else {
        // It cannot be read, so its owner replaces it like any damaged document.
        return Ok(());
    };
    match format_in(&begin[..length]) {
        Some(found) if found > FORMAT => {
            Err(StoreError::TooNew { path: path.to_owned(), found, known: FORMAT })
        }
        _ => Ok(()),
    }
}

/// The format that the beginning of a document gives.
fn format_in(begin: &[u8]) -> Option<u32> {
    let text = String::from_utf8_lossy(begin);
    let after = text.trim_start().strip_prefix('{')?.trim_start().strip_prefix("\"format\"")?;
    let number = after.trim_start().strip_prefix(':')?.trim_start();
    let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
    number[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{check_format, format_in, parse, refuse_later, to_json};
    use crate::model::FORMAT;
    use crate::store::StoreError;

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Doc {
        format: u32,
        layers: Vec<String>,
    }

    fn doc() -> Doc {
        Doc { format: 1, layers: vec!["one".to_owned(), "two".to_owned()] }
    }

    fn read(bytes: &[u8]) -> super::Result<Doc> {
        parse(Path::new("x.json"), bytes)
    }

    #[test]
    fn a_document_is_read_as_it_was_written_in_the_format_of_today() {
        let bytes = to_json(&doc(), Path::new("x.json")).unwrap();
        assert_eq!(read(&bytes).unwrap(), Doc { format: FORMAT, ..doc() });
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.starts_with(&format!("{{\n  \"format\": {FORMAT},\n  \"checksum\": \"")));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["checksum"].as_str().map(str::len), Some(64));
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = to_json(&doc(), Path::new("x.json")).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                assert!(read(&flipped).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn every_truncation_and_an_edit_are_found() {
        let bytes = to_json(&doc(), Path::new("x.json")).unwrap();
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_err(), "{length} bytes");
        }
        let text = String::from_utf8(bytes).unwrap();
        let edited = text.replace("\"one\",\n    ", "");
        assert_ne!(edited, text);
        let refused = read(edited.as_bytes()).unwrap_err();
        assert!(
            matches!(&refused, StoreError::Damaged { reason, .. } if reason.contains("checksum"))
        );
    }

    #[test]
    fn older_formats_need_no_checksum_and_this_one_does() {
        assert_eq!(read(br#"{"format":4,"layers":["one","two"]}"#).unwrap().format, 4);
        let without = format!(r#"{{"format":{FORMAT},"layers":[]}}"#);
        assert!(matches!(read(without.as_bytes()), Err(StoreError::Damaged { .. })));
        assert_eq!(check_format(Path::new("x.json"), without.as_bytes()).unwrap(), FORMAT);
        let later = format!(r#"{{"format":{},"layers":"what"}}"#, FORMAT + 1);
        assert!(matches!(read(later.as_bytes()), Err(StoreError::TooNew { .. })));
    }

    #[test]
    fn what_a_later_version_wrote_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        assert!(refuse_later(&path).is_ok(), "nothing is there");
        for (text, refused) in [
            (String::new(), false),
            ("garbage".to_owned(), false),
            (format!("{{\"format\":{FORMAT}}}"), false),
            (format!("{{\"format\":{}}}", FORMAT + 1), true),
            (format!("{{\n  \"format\": {},\n  \"checksum\": \"", FORMAT + 1), true),
        ] {
            fs::write(&path, &text).unwrap();
            assert_eq!(refuse_later(&path).is_err(), refused, "{text}");
        }
        assert_eq!(format_in(b"{ \"format\" : 12 "), Some(12));
    }
}
