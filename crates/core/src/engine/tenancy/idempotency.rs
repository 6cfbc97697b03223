//! Idempotency keys: retries under one key do the work once and get the same answer.
//!
//! The answer is kept in the index for a day. While the first caller is still at work the others
//! wait. Creates and forks are safe even against a crash between the work and the answer: the key is
//! in the sandbox's own manifest.

use std::future::Future;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::db::Remembered;
use crate::engine::tenancy::Tenancy;
use crate::engine::{Error, Result};
use crate::keyed_lock::KeyGuard;
use crate::model::Name;

impl Tenancy {
    /// Does `work` unless it was done under this key before.
    pub(in crate::engine) async fn idempotent<T, F>(
        &self,
        project: &Name,
        key: Option<String>,
        request: String,
        work: F,
    ) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
        F: Future<Output = Result<T>>,
    {
        let Some(key) = key else { return work.await };
        check(&key)?;
        let _one = self.idempotency.lock(&(project.clone(), key.clone())).await;
        self.remembered(project, &key, request, work).await
    }

    /// Decides something before the work is begun, or finds what was decided under this key before.
    /// No other call works under the key until the guard is dropped.
    pub(in crate::engine) async fn decide_once<T>(
        &self,
        project: &Name,
        key: String,
        request: String,
        decide: impl FnOnce() -> T,
    ) -> Result<(KeyGuard<(Name, String)>, T)>
    where
        T: Serialize + DeserializeOwned,
    {
        check(&key)?;
        let one = self.idempotency.lock(&(project.clone(), key.clone())).await;
        let decided = self.remembered(project, &key, request, async { Ok(decide()) }).await?;
        Ok((one, decided))
    }

    async fn remembered<T, F>(
        &self,
        project: &Name,
        key: &str,
        request: String,
        work: F,
    ) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
        F: Future<Output = Result<T>>,
    {
        if let Some(before) = self.db.recall(project, key).await? {
            if before.request != request {
                return Err(Error::KeyReused(key.to_owned()));
            }
            let read = serde_json::from_str(&before.answer);
            return read.map_err(|source| {
                crate::db::DbError::Damaged { kind: "kept answer", source }.into()
            });
        }
        let answer = work.await?;
        let text = serde_json::to_string(&answer)
            .map_err(|source| crate::db::DbError::Damaged { kind: "answer to keep", source })?;
        self.db.remember(project, key, &Remembered { request, answer: text }).await?;
        Ok(answer)
    }
}

fn check(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > 255 || key.chars().any(char::is_control) {
        return Err(Error::invalid("idempotency key", "1 to 255 characters on one line"));
    }
    Ok(())
}
