//! What is kept: snapshots, drives, memory, and the root filesystem that layers are stacked to.

pub(super) mod drive;
pub(super) mod memory;
pub(super) mod pages;
pub(super) mod root;
pub(super) mod snapshot;
