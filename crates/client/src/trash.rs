//! Calls about the trash: list deleted sandboxes, restore one, delete all for good.

use hyper::Method;

use crate::query::Target;
use crate::transport::Call;
use crate::types::{Paged, Restore, Sandbox, TrashEmptied, TrashItem};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Lists the sandboxes in the trash, the latest first.
    pub async fn trash(&self) -> Result<Vec<TrashItem>, Error> {
        let page: Paged<TrashItem> =
            self.transport.json(Call::get(Target::new(&["trash"]))).await?;
        Ok(page.items)
    }

    /// Brings a sandbox back from the trash, by its id or its name.
    pub async fn restore(&self, which: &str, request: &Restore) -> Result<Sandbox, Error> {
        let target = Target::new(&["trash", which, "restore"]);
        self.transport.json(Call::post(target).json(request)?).await
    }

    /// Deletes what is in the trash for good.
    pub async fn empty_trash(&self) -> Result<TrashEmptied, Error> {
        self.transport.json(Call::new(Method::DELETE, Target::new(&["trash"]))).await
    }
}
