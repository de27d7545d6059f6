"""``morecl serve``: a web page and an API over one model. Needs the extra ``serve``.

    app.py        the endpoints                     security.py  who may ask, how much, and what a browser may do
    service.py    the model in use, and its folder  batching.py  requests that arrive together are one batch
    uploads.py    files of strangers -> arrays      jobs.py      lessons, one at a time, each in its own process
    teaching.py   that process                      limits.py    how much is accepted
    metrics.py    for Prometheus                    page/        HTML, CSS and JavaScript, as they are served
    running.py    from a folder to a running server
    private.py    the folder in which images wait

The thread of the event loop parses and waits; one thread asks the model; one thread looks after lessons. A new version
is loaded beside the one in use and then replaces it in one assignment, so a batch is answered by exactly one version.
"""
