"""What every process of a run did when, from the spans in its folder: for Perfetto, as figures, and as a picture."""
