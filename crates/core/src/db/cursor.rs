//! Page cursors: where a page of a list ended.
//!
//! A cursor holds the sort key and the id of the last item, so that what comes or goes in between
//! neither repeats nor hides anything else. It also holds a mark of the list it belongs to, order and
//! filter included: a cursor that is shown to another list is refused, not misread.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{DbError, DbResult};

/// What a list is sorted by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum CursorKey {
    Number(i64),
    Text(String),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Cursor {
    #[serde(rename = "l")]
    list: String,
    #[serde(rename = "k")]
    pub(super) key: CursorKey,
    #[serde(rename = "i")]
    pub(super) id: String,
}

impl Cursor {
    /// `list` is any text that differs between lists that do not share cursors.
    pub(super) fn new(list: &str, key: CursorKey, id: String) -> Self {
        Self { list: mark(list), key, id }
    }

    pub(super) fn parse(text: &str, list: &str) -> DbResult<Self> {
        let read = URL_SAFE_NO_PAD.decode(text).ok();
        let cursor: Option<Self> = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        cursor.filter(|cursor| cursor.list == mark(list)).ok_or(DbError::Cursor)
    }

    pub(super) fn write(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }
}

fn mark(list: &str) -> String {
    URL_SAFE_NO_PAD.encode(&Sha256::digest(list.as_bytes())[..9])
}

#[cfg(test)]
mod tests {
    use super::{Cursor, CursorKey};

    #[test]
    fn a_cursor_belongs_to_one_list() {
        let cursor =
            Cursor::new("a", CursorKey::Text("é\"".to_owned()), "sbx-1".to_owned()).write();
        let read = Cursor::parse(&cursor, "a").unwrap();
        assert_eq!((read.key, read.id.as_str()), (CursorKey::Text("é\"".to_owned()), "sbx-1"));
        assert!(Cursor::parse(&cursor, "b").is_err());
        for text in ["", "?", "AAAA", "e30", &cursor[1..]] {
            assert!(Cursor::parse(text, "a").is_err(), "{text}");
        }
    }
}
