//! Calls about drives: create, get, list, fork, delete.

use hyper::Method;

use crate::paging::Pages;
use crate::query::Target;
use crate::transport::Call;
use crate::types::{CreateDrive, Drive, ForkDrive};
use crate::{Client, Error};

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Makes a drive, or gets the one of that name if asked to.
    pub async fn create_drive(&self, request: &CreateDrive) -> Result<Drive, Error> {
        self.transport.json(Call::post(Target::new(&["drives"])).json(request)?).await
    }

    /// Gets a drive.
    pub async fn drive(&self, name: &str) -> Result<Drive, Error> {
        self.transport.json(Call::get(Target::new(&["drives", name]))).await
    }

    /// Lists drives, newest first; those whose names begin with `prefix`, if given.
    #[must_use]
    pub fn drives(&self, prefix: Option<&str>) -> Pages<Drive> {
        let prefix = prefix.map(str::to_owned);
        Pages::new(self, move || Target::new(&["drives"]).maybe("name_prefix", prefix.as_ref()))
    }

    /// Makes a new drive that holds what another one held when it was last detached.
    pub async fn fork_drive(&self, name: &str, request: &ForkDrive) -> Result<Drive, Error> {
        let target = Target::new(&["drives", name, "fork"]);
        self.transport.json(Call::post(target).json(request)?).await
    }

    /// Deletes a drive without a writer.
    pub async fn delete_drive(&self, name: &str) -> Result<Drive, Error> {
        let target = Target::new(&["drives", name]);
        self.transport.json(Call::new(Method::DELETE, target)).await
    }
}
