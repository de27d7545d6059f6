"""Work on a Ray cluster: runs of a suite or a search, and predictions. Needs the extra ``ray``.

``cluster`` (connect, what a task asks for), ``runs`` (a place for the runs of a suite), ``answers`` (predictions),
``node`` (what is done on the nodes). Ray carries only requests, exit codes and answers. Everything else, logs included,
is on storage that all nodes see under the same path.
"""
