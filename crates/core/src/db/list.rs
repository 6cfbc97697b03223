//! How lists are sorted and cut into pages, in SQL.

use serde::de::DeserializeOwned;
use sqlx::sqlite::{SqlitePool, SqliteRow};
use sqlx::{QueryBuilder, Row, Sqlite};

use super::cursor::{Cursor, CursorKey};
use super::sqlite::{failed, read};
use super::{By, DbError, DbResult, Direction, Order, Page, Paged};

/// Sorts and cuts what `query` finds. `list` is what the query depends on, which a cursor must
/// have in common with it.
pub(super) async fn page<T: DeserializeOwned>(
    pool: &SqlitePool,
    mut query: QueryBuilder<Sqlite>,
    page: &Page,
    list: &str,
    column: &'static str,
) -> DbResult<Paged<T>> {
    let Order { by, direction } = page.order;
    let list = format!("{list} {by:?} {direction:?}");
    let (before, sort) = match direction {
        Direction::Ascending => (") > (", " ASC"),
        Direction::Descending => (") < (", " DESC"),
    };
    if let Some(cursor) = &page.cursor {
        let Cursor { key, id, .. } = Cursor::parse(cursor, &list)?;
        query.push(" AND (").push(column).push(", id").push(before);
        match key {
            CursorKey::Number(number) => query.push_bind(number),
            CursorKey::Text(text) => query.push_bind(text),
        };
        query.push(", ").push_bind(id).push(")");
    }
    query.push(" ORDER BY ").push(column).push(sort).push(", id").push(sort);
    query.push(" LIMIT ").push_bind(i64::from(page.limit) + 1);
    let rows = query.build().fetch_all(pool).await.map_err(failed("list documents"))?;
    let shown = &rows[..rows.len().min(page.limit as usize)];
    let items = shown.iter().map(read).collect::<DbResult<Vec<T>>>()?;
    let next = match shown.last().filter(|_| rows.len() > shown.len()) {
        Some(last) => Some(place(last, &list)?),
        None => None,
    };
    Ok(Paged { items, next })
}

/// The beginning of a list's query: the key it is sorted by, the id, the document.
pub(super) fn listing(table: &'static str, column: &'static str) -> QueryBuilder<Sqlite> {
    QueryBuilder::new(format!("SELECT {column} AS place, id, doc FROM {table} WHERE 1 = 1"))
}

/// Leaves names that begin in this way.
pub(super) fn begins_with(query: &mut QueryBuilder<Sqlite>, prefix: &str) {
    let length = i64::try_from(prefix.chars().count()).unwrap_or(i64::MAX);
    query.push(" AND substr(name, 1, ").push_bind(length).push(") = ").push_bind(prefix.to_owned());
}

/// Ids sort by when they were made.
pub(super) fn by_id(page: &Page) -> DbResult<&'static str> {
    if page.order.by == By::Created { Ok("id") } else { Err(DbError::Order) }
}

/// Where the next page begins.
fn place(last: &SqliteRow, list: &str) -> DbResult<String> {
    let key = match last.try_get::<i64, _>("place") {
        Ok(number) => CursorKey::Number(number),
        Err(_) => CursorKey::Text(last.try_get("place").map_err(failed("read a place"))?),
    };
    let id = last.try_get("id").map_err(failed("read an id"))?;
    Ok(Cursor::new(list, key, id).write())
}
