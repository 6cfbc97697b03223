-- An index over the manifests on disk. Each row holds its document; the other columns are for finding it.
CREATE TABLE projects (name TEXT PRIMARY KEY, doc TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY, project TEXT NOT NULL, name TEXT NOT NULL, phase TEXT NOT NULL, class TEXT NOT NULL,
    current TEXT, created_with TEXT, created_ms INTEGER NOT NULL, phase_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL, doc TEXT NOT NULL, UNIQUE (project, name)
) WITHOUT ROWID;
CREATE TABLE tags (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE, key TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (sandbox, key)
) WITHOUT ROWID;
CREATE INDEX tags_by_value ON tags (key, value);
CREATE INDEX sandboxes_by_current ON sandboxes (current);
CREATE INDEX sandboxes_by_age ON sandboxes (project, created_ms, id);
CREATE INDEX sandboxes_by_key ON sandboxes (project, created_with);
-- Tags follow the document by themselves: a sandbox is kept by one statement, and most change no tags.
CREATE TRIGGER tags_of_new AFTER INSERT ON sandboxes BEGIN
    INSERT INTO tags (sandbox, key, value) SELECT new.id, key, value FROM json_each(new.doc, '$.config.tags');
END;
CREATE TRIGGER tags_of_changed AFTER UPDATE OF doc ON sandboxes
WHEN json_extract(old.doc, '$.config.tags') IS NOT json_extract(new.doc, '$.config.tags') BEGIN
    DELETE FROM tags WHERE sandbox = new.id;
    INSERT INTO tags (sandbox, key, value) SELECT new.id, key, value FROM json_each(new.doc, '$.config.tags');
END;
-- Snapshots that a sandbox is compared with: what it was forked from, and what it merged last.
CREATE TABLE bases (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE, snapshot TEXT NOT NULL,
    PRIMARY KEY (sandbox, snapshot)
) WITHOUT ROWID;
CREATE INDEX bases_by_snapshot ON bases (snapshot);
CREATE TRIGGER bases_of_new AFTER INSERT ON sandboxes
WHEN json_extract(new.doc, '$.forked_from.snapshot', '$.merged') <> '[null,null]' BEGIN
    INSERT OR IGNORE INTO bases (sandbox, snapshot)
    SELECT new.id, json_extract(new.doc, '$.forked_from.snapshot') WHERE json_extract(new.doc, '$.forked_from.snapshot') IS NOT NULL
    UNION SELECT new.id, json_extract(value, '$.snapshot') FROM json_each(new.doc, '$.merged');
END;
CREATE TRIGGER bases_of_changed AFTER UPDATE OF doc ON sandboxes
WHEN json_extract(old.doc, '$.forked_from.snapshot', '$.merged') IS NOT json_extract(new.doc, '$.forked_from.snapshot', '$.merged') BEGIN
    DELETE FROM bases WHERE sandbox = new.id;
    INSERT OR IGNORE INTO bases (sandbox, snapshot)
    SELECT new.id, json_extract(new.doc, '$.forked_from.snapshot') WHERE json_extract(new.doc, '$.forked_from.snapshot') IS NOT NULL
    UNION SELECT new.id, json_extract(value, '$.snapshot') FROM json_each(new.doc, '$.merged');
END;
CREATE INDEX sandboxes_by_expiry ON sandboxes (expires_ms);
CREATE TABLE sessions (id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, doc TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX sessions_by_sandbox ON sessions (sandbox, id);
CREATE TABLE commands (
    id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, session TEXT NOT NULL, doc TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX commands_by_sandbox ON commands (sandbox, id);
CREATE INDEX commands_by_session ON commands (session, id);
-- A row with `deleted_ms` is a tombstone. `created_ms` is when it was made, which is not when its layer was begun.
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY, project TEXT NOT NULL, sandbox TEXT NOT NULL, name TEXT NOT NULL,
    generation INTEGER NOT NULL, created_ms INTEGER NOT NULL, expires_ms INTEGER, deleted_ms INTEGER, doc TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox, created_ms, id);
CREATE INDEX snapshots_by_project ON snapshots (project, created_ms, id);
CREATE INDEX snapshots_by_generation ON snapshots (sandbox, generation, created_ms) WHERE deleted_ms IS NULL;
CREATE INDEX snapshots_to_expire ON snapshots (sandbox, expires_ms) WHERE deleted_ms IS NULL;
CREATE INDEX snapshots_by_expiry ON snapshots (expires_ms) WHERE deleted_ms IS NULL;
CREATE INDEX snapshots_by_death ON snapshots (deleted_ms) WHERE deleted_ms IS NOT NULL;
CREATE TABLE drives (
    id TEXT PRIMARY KEY, project TEXT NOT NULL, name TEXT NOT NULL, created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL, doc TEXT NOT NULL, UNIQUE (project, name)
) WITHOUT ROWID;
CREATE TABLE idempotency (
    project TEXT NOT NULL, key TEXT NOT NULL, request TEXT NOT NULL, answer TEXT NOT NULL, at_ms INTEGER NOT NULL,
    PRIMARY KEY (project, key)
) WITHOUT ROWID;
-- Which opening of the data directory it belongs to.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
