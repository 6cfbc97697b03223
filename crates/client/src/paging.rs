//! Lists that come page by page.

use std::fmt;

use serde::de::DeserializeOwned;

use crate::query::Target;
use crate::transport::Call;
use crate::types::Paged;
use crate::{Client, Error};

/// A list that is fetched as far as it is read.
pub struct Pages<T> {
    client: Client,
    target: Box<dyn Fn() -> Target + Send + Sync>,
    // The outer option says whether there is a next page, the inner where it begins.
    next: Option<Option<String>>,
    of: std::marker::PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("next", &self.next).finish_non_exhaustive()
    }
}

impl<T: DeserializeOwned> Pages<T> {
    pub(crate) fn new(
        client: &Client,
        target: impl Fn() -> Target + Send + Sync + 'static,
    ) -> Self {
        Self {
            client: client.clone(),
            target: Box::new(target),
            next: Some(None),
            of: std::marker::PhantomData,
        }
    }

    /// Begins at `cursor`, which an earlier page named.
    #[must_use]
    pub fn starting_at(mut self, cursor: Option<String>) -> Self {
        self.next = Some(cursor);
        self
    }

    /// Fetches the next page, or nothing when there is no more.
    ///
    /// # Errors
    ///
    /// Whatever the server or the connection says.
    pub async fn next(&mut self) -> Result<Option<Paged<T>>, Error> {
        let Some(cursor) = self.next.take() else { return Ok(None) };
        let target = (self.target)().maybe("cursor", cursor);
        let page: Paged<T> = self.client.transport.json(Call::get(target)).await?;
        self.next = page.next.clone().map(Some);
        Ok(Some(page))
    }

    /// Fetches everything, or the first `limit` of it.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub async fn collect(mut self, limit: Option<usize>) -> Result<Vec<T>, Error> {
        let limit = limit.unwrap_or(usize::MAX);
        let mut all = Vec::new();
        while all.len() < limit
            && let Some(page) = self.next().await?
        {
            all.extend(page.items);
        }
        all.truncate(limit);
        Ok(all)
    }
}
