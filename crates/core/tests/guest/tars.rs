//! tars
