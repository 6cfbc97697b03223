//! `keep serve`.
use crate::args::{Global, ServeArgs};
use crate::config;
use crate::failure::Failure;
pub(crate) async fn serve(global: &Global, args: ServeArgs) -> Result<(), Failure> {
    let resolved = config::resolve(global, args)?;
    Err(Failure::here(format!("not wired {resolved:?}")))
}
