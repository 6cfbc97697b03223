//! guest.
