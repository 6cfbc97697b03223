//! Work that people govern: runs, and the approvals that hold their effects.

pub mod approval;
pub mod run;
