//! How requests of these clients are read and answers written.
//!
//! `auth` finds the project by the token, `input` reads requests (`ordered` where the order of fields counts), `error` writes
//! refusals, `ids` and `wire` translate ids and records, `ndjson` streams lines.

pub(crate) mod auth;
pub(crate) mod error;
pub(crate) mod ids;
pub(crate) mod input;
pub(crate) mod ndjson;
pub(crate) mod ordered;
pub(crate) mod wire;
