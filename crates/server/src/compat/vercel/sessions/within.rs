//! The session that a request names, and the answer for an ended one.
//!
//! Their clients act on three answers: 410 means that the session is over, 422 that it is about to
//! be; on both they resume the sandbox and ask once more. 404 means that it never was.

use axum::http::StatusCode;
use sandkeep_core::engine::{Caller, Error, WakeMode};
use sandkeep_core::guest::GuestError;
use sandkeep_core::model::{Command, CommandId, KeyId, Name, Sandbox, Session};

use crate::api::App;
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::ids::Foreign as _;
use crate::compat::vercel::protocol::wire;
use crate::compat::vercel::sessions;

/// A session and the sandbox it is of.
#[derive(Debug)]
pub(crate) struct Within {
    pub(crate) sandbox: Sandbox,
    pub(crate) session: Session,
    /// The caller's key.
    pub(crate) key: KeyId,
}

impl Within {
    /// Finds the session that a path names.
    pub(crate) async fn find(app: &App, caller: &Caller, id: &str) -> Result<Self, VercelError> {
        let (sandbox, session) = sessions::find(app, caller, id).await?;
        Ok(Self { sandbox, session, key: caller.key.clone() })
    }

    /// Finds it if it is under way.
    pub(crate) async fn running(app: &App, caller: &Caller, id: &str) -> Result<Self, VercelError> {
        let (sandbox, session) = sessions::running(app, caller, id).await?;
        Ok(Self { sandbox, session, key: caller.key.clone() })
    }

    pub(crate) fn project(&self) -> &Name {
        &self.sandbox.project
    }

    pub(crate) fn name(&self) -> &Name {
        &self.sandbox.name
    }

    /// This session or none.
    pub(crate) fn only(&self) -> WakeMode {
        WakeMode::Session(self.session.id.clone())
    }

    /// A path as their clients mean it: relative ones begin at `cwd`, and that at the session's.
    pub(crate) fn path(&self, cwd: Option<&str>, path: &str) -> String {
        let home = wire::cwd(&self.sandbox);
        let base = cwd.map_or(home.clone(), |cwd| join(&home, cwd));
        join(&base, path)
    }

    /// Finds a command of this session.
    pub(crate) async fn command(&self, app: &App, id: &str) -> Result<Command, VercelError> {
        let unknown = || {
            VercelError::new(
                StatusCode::NOT_FOUND,
                "command_not_found_or_exited",
                "The command does not exist.",
            )
        };
        let id = CommandId::read(id).ok_or_else(unknown)?;
        match app.engine.command(self.project(), self.name(), &id).await {
            Ok(command) if command.session == self.session.id => Ok(command),
            Ok(_) | Err(Error::NoCommand { .. }) => Err(unknown()),
            Err(error) => Err(error.into()),
        }
    }

    /// What to say of an error that may mean that the session is over, or just about to be.
    pub(crate) async fn explain(&self, app: &App, error: Error) -> VercelError {
        match error {
            Error::SessionEnded { .. } => {
                let again = app.engine.session(self.project(), &self.session.id).await;
                match again.map(|(sandbox, session)| sessions::under_way(&sandbox, &session)) {
                    Ok(Err(said)) => said,
                    // It runs by its record, and its machine is gone: that is over.
                    Ok(Ok(())) => VercelError::stopped(),
                    Err(error) => error.into(),
                }
            }
            // The request may have been carried out; a caller that repeats it finds the session
            // over, if it is.
            Error::Guest(GuestError::Lost | GuestError::Timeout) => VercelError::new(
                StatusCode::GONE,
                "sandbox_stream_closed",
                "Sandbox stream was closed and is not accepting commands.",
            ),
            error => error.into(),
        }
    }
}

fn join(base: &str, path: &str) -> String {
    match path {
        "" | "." => base.to_owned(),
        _ if path.starts_with('/') => path.to_owned(),
        _ => format!("{}/{path}", base.trim_end_matches('/')),
    }
}

#[cfg(test)]
mod tests {
    use super::join;

    #[test]
    fn paths_begin_where_they_are_said_to() {
        for (base, path, whole) in [
            ("/vercel/sandbox", "a/b", "/vercel/sandbox/a/b"),
            ("/", "a", "/a"),
            ("/x", "/etc", "/etc"),
            ("/x/", ".", "/x/"),
            ("/x", "../y", "/x/../y"),
        ] {
            assert_eq!(join(base, path), whole);
        }
    }
}
