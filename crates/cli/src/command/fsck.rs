//! `keep fsck`.
use crate::args::{FsckArgs, Global};
use crate::failure::Failure;
pub(super) async fn fsck(_global: &Global, _args: &FsckArgs) -> Result<(), Failure> {
    Err(Failure::here("not wired"))
}
