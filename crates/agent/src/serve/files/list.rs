//! Directory listings.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use sandkeep_proto::frame::MAX_PAYLOAD;
use sandkeep_proto::link::{Entry, Reply};

use super::entry;
use crate::serve::error::RequestError;
use crate::serve::files::worker::FileTarget;

/// How many entries one answer has at most.
const ENTRIES: usize = 10_000;
/// How large one answer may get, with room for what is around the entries.
const BYTES: usize = MAX_PAYLOAD - (64 << 10);

/// Lists a directory, sorted by name, from after the name `after`.
pub(crate) fn list(target: FileTarget, after: Option<&str>) -> Result<Reply, RequestError> {
    let path = &target.path;
    let problem = |error: std::io::Error| RequestError::io("list", path, &error);
    let mut names: Vec<OsString> = Vec::new();
    for found in fs::read_dir(path).map_err(problem)? {
        let name = found.map_err(problem)?.file_name();
        if after.is_none_or(|after| shown(&name).as_bytes() > after.as_bytes()) {
            names.push(name);
        }
    }
    // By the name that is shown first, so that `after` means the same to both sides.
    names.sort_by(|a, b| shown(a).cmp(&shown(b)).then_with(|| a.cmp(b)));
    page(path, &names)
}

fn shown(name: &OsString) -> std::borrow::Cow<'_, str> {
    name.to_string_lossy()
}

fn page(dir: &Path, names: &[OsString]) -> Result<Reply, RequestError> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut size = 0;
    for name in names {
        let path = dir.join(name);
        // Gone since it was listed.
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        let entry = entry(&path, name.as_bytes(), &meta);
        size += serde_json::to_vec(&entry).map_or(0, |json| json.len() + 1);
        if entries.len() >= ENTRIES || size > BYTES {
            return Ok(Reply::Entries { entries, more: true });
        }
        entries.push(entry);
    }
    Ok(Reply::Entries { entries, more: false })
}
