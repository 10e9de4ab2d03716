"""The model in the box: its corpus, examination and trainers. What they make ships as app.understudy."""
