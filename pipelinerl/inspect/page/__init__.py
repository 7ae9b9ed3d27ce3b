"""One self-contained page about one or several runs: `pipelinerl report RUN [RUN2 …]`.

`data` turns a run folder into plain data, `browser` does so for its rollouts, and `build` makes one HTML file from
both. The page draws its charts itself as inline SVG, because it needs only lines, hover and click. A plotting library
would take 1 MB (Bokeh) to 4.5 MB (Plotly) of the 5 MB that a report may have.
"""
